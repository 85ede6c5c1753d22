"""Checks before a job starts: that the timeouts of the layers below the supervisor expire in order."""

from collections.abc import Mapping

from zaya_jax.aegis.policy import Policy
from zaya_jax.errors import InputError
from zaya_jax.hardware.presets import HEARTBEAT_MARGIN, Preset

_IB_RETRIES = 7  # default of NCCL and RCCL
_IB_UNIT = 4.096e-6  # seconds


def network_window(preset: Preset, environment: Mapping[str, str]) -> float:
    """Return the seconds that RCCL or NCCL retries over a link that is down; 0 for a preset without a network.

    An attempt waits 4.096 µs · 2^NCCL_IB_TIMEOUT, and is repeated NCCL_IB_RETRY_CNT times (InfiniBand specification;
    NCCL's documentation of both variables).
    """
    settings = {setting.name: setting.value for setting in preset.settings}
    if "NCCL_IB_TIMEOUT" not in settings:
        return 0.0
    exponent = environment.get("NCCL_IB_TIMEOUT", settings["NCCL_IB_TIMEOUT"])
    retries = environment.get("NCCL_IB_RETRY_CNT", str(_IB_RETRIES))
    for name, value in (("NCCL_IB_TIMEOUT", exponent), ("NCCL_IB_RETRY_CNT", retries)):
        if not value.isdecimal() or int(value) > 31:
            raise InputError(f"The environment variable {name} is {value!r}, but must be a number from 0 to 31.")
    return _IB_UNIT * 2 ** int(exponent) * int(retries)


def check_timeouts(policy: Policy, preset: Preset, peer_timeout: float, environment: Mapping[str, str]) -> None:
    """Raise `InputError` unless the network gives up first, then the peers, then jax, then the supervisor.

    In another order, a link that is down for a moment would end a job that the network would have kept alive, or an
    error would be reported by a layer that does not know its cause.

    Args:
      policy: of the supervisor.
      preset: of the machine; on one without a network nothing is checked.
      peer_timeout: of the trainer, in seconds.
      environment: of the trainer.
    """
    window = network_window(preset, environment)
    if window == 0:
        return
    if peer_timeout <= window:
        raise InputError(
            f"The peer timeout is {peer_timeout:g} s, but must exceed {window:.0f} s, the time that the network "
            "retries over a link that is down. Raise --peer-timeout, or lower NCCL_IB_TIMEOUT."
        )
    heartbeat = peer_timeout + HEARTBEAT_MARGIN
    if policy.watch.link_down_seconds <= window:
        raise InputError(
            f"watch.link_down_seconds is {policy.watch.link_down_seconds:g}, but must exceed "
            f"{window:.0f} s, the time that the network retries over a link that is down."
        )
    for name in ("floor", "data", "dispatch", "device_wait", "end"):
        seconds = getattr(policy.timeouts, name)
        if seconds <= heartbeat:
            raise InputError(
                f"timeouts.{name} is {seconds:g}, but must exceed {heartbeat:g} s, jax's heartbeat timeout: the "
                f"network retries for {window:.0f} s, and the peer timeout is {peer_timeout:g} s."
            )
