"""The sinks of a run: its metric files, and those that `train.sinks` names."""

from importlib.util import find_spec
from pathlib import Path

from zaya_jax.config import Config
from zaya_jax.config.checks import counted
from zaya_jax.errors import InputError
from zaya_jax.job.multihost import is_primary
from zaya_jax.run.folder import METRICS, TIMINGS
from zaya_jax.run.metrics import DiskGuard, JsonlFile, JsonlSink, MetricSink
from zaya_jax.train.sinks.mirror import Mirror

_PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}  # sink → package; the extra has the name of the sink


def require_sinks(config: Config) -> None:
    """Raise `InputError` if the package of a sink is not installed, or W&B would ask process 0 for a login."""
    for name in config.train.sinks:
        if find_spec(_PACKAGES[name]) is None:
            advice = f"Install it with pip install 'zaya-jax[{name}]', or remove {name} from train.sinks."
            raise InputError(f"train.sinks has {name}, but the package {_PACKAGES[name]} is not installed. {advice}")
    if is_primary() and "wandb" in config.train.sinks:
        from zaya_jax.train.sinks.wandb import require_login

        require_login()


def open_sinks(config: Config, folder: Path, step: int, first: int, disk: DiskGuard) -> list[MetricSink]:
    """Open the metric files of a run and the sinks of `train.sinks`, in the primary process; none elsewhere.

    The run continues after `step`, and later rows are dropped; `first` steps were done before this run folder's first.
    """
    if not is_primary():
        return []
    metrics = JsonlFile(folder / METRICS, step, first, disk, complete=True)
    timings = JsonlFile(folder / TIMINGS, step, first, disk)
    if metrics.dropped and step == first:
        steps = f"{counted(metrics.dropped, 'step')} in {METRICS}"
        disk.say(f"No checkpoint covers the {steps}: restarting from the first step.")
    mirrors = [_open_mirror(config, name, folder, step, first, disk) for name in config.train.sinks]
    return [JsonlSink(metrics, timings), *mirrors]


def _open_mirror(config: Config, name: str, folder: Path, step: int, first: int, disk: DiskGuard) -> Mirror:
    def open_sink(after: int) -> MetricSink:
        if name == "tensorboard":
            from zaya_jax.train.sinks.tensorboard import TensorBoardSink

            return TensorBoardSink(folder / name, after)
        from zaya_jax.train.sinks.wandb import WandbSink

        return WandbSink(folder / name, config)

    return Mirror(name, open_sink, folder, first, step, disk.say, rewinds=name == "tensorboard")
