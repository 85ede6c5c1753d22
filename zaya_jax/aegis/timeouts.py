"""Limits for the stay of a process in a phase: learned from the longest stays, within the policy's limits."""

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path

from zaya_jax.aegis.policy import Policy, TimeoutPolicy
from zaya_jax.errors import InputError
from zaya_jax.hardware.presets import HEARTBEAT_MARGIN, Preset
from zaya_jax.run.files import read_object, write_atomically
from zaya_jax.run.progress_record import Phase, Progress

_FILE = "timeouts.json"
_IB_RETRIES = 7  # default of NCCL and RCCL
_IB_UNIT = 4.096e-6  # seconds


class Timeouts:
    """The timeouts of the phases, kept in a file, so that a restarted supervisor need not learn them again."""

    def __init__(self, policy: TimeoutPolicy, folder: Path, command: str) -> None:
        """Read what was learned in `folder` from the same `command`, a digest."""
        self._policy, self._path, self._command = policy, folder / _FILE, command
        self._longest: dict[str, float] = {}
        damage = InputError, KeyError, TypeError, ValueError, AttributeError  # or missing: then learn again
        with contextlib.suppress(*damage):
            learned = read_object(self._path)
            if learned["command"] == command:
                self._longest = {name: float(seconds) for name, seconds in learned["longest"].items()}

    def limit(self, phase: Phase, progress: Progress | None) -> float:
        """Return the seconds that a process may stay in `phase`: those of the policy, or what was learned.

        That applies after `learn_after` steps; before, a process may wait for other nodes, which compile.
        """
        most = self._policy.of(phase)
        if phase.name not in self._longest or not self._has_trained(progress):
            return most
        return min(most, max(self._policy.floor, self._policy.factor * self._longest[phase.name]))

    def learn(self, progress: Progress) -> None:
        """Learn from the stays of a process that has trained for enough steps."""
        if not self._has_trained(progress):
            return
        for phase in (Phase.DATA, Phase.DISPATCH, Phase.DEVICE_WAIT, Phase.EVALUATE, Phase.SAVE):
            if progress.longest[phase] > self._longest.get(phase.name, 0.0):
                self._longest[phase.name] = progress.longest[phase]

    def _has_trained(self, progress: Progress | None) -> bool:
        return progress is not None and 0 <= progress.first_step <= progress.step - self._policy.learn_after

    def save(self) -> None:
        """Write what was learned; a full disk is ignored."""
        with contextlib.suppress(OSError):
            write_atomically(self._path, json.dumps({"command": self._command, "longest": self._longest}) + "\n")


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
    error would be reported by a layer that does not know its cause. On a preset without a network nothing is checked.
    The `peer_timeout` of the trainer is in seconds, and `environment` is that of the trainer.
    """
    window = network_window(preset, environment)
    if window == 0:
        return
    retries = f"{window:.0f} s, the time that the network retries over a link that is down."
    advice = f"{retries} Raise --peer-timeout, or lower NCCL_IB_TIMEOUT."
    heartbeat = peer_timeout + HEARTBEAT_MARGIN
    layers = f"the network retries for {window:.0f} s, and the peer timeout is {peer_timeout:g} s."
    layers = f"{heartbeat:g} s, jax's heartbeat timeout: {layers}"
    limits = [("The peer timeout", peer_timeout, window, advice)]
    limits.append(("watch.link_down_seconds", policy.watch.link_down_seconds, window, retries))
    names = ("floor", "data", "dispatch", "device_wait", "end")
    limits += [(f"timeouts.{name}", getattr(policy.timeouts, name), heartbeat, layers) for name in names]
    for name, seconds, least, reason in limits:
        if seconds <= least:
            raise InputError(f"{name} is {seconds:g} s, but must exceed {reason}")
