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
            raise InputError(f"train.sinks has {name}, but the package {_PACKAGES[name]} is not installed. Install it "
                             f"with pip install 'zaya-jax[{name}]', or remove {name} from train.sinks.")  # fmt: skip
    if is_primary() and "wandb" in config.train.sinks:
        from zaya_jax.train.sinks.wandb import require_login

        require_login()


def open_sinks(config: Config, folder: Path, step: int, first: int, disk: DiskGuard) -> list[MetricSink]:
    """Open the metric files of a run, and the sinks of `train.sinks` after them.

    Args:
      config: configuration of the run.
      folder: the run folder.
      step: the step that the run continues after; later rows are dropped.
      first: steps done before this run folder's first.
      disk: reports files that cannot be written.

    Returns:
      The sinks; none in processes other than the primary.
    """
    if not is_primary():
        return []
    metrics = JsonlFile(folder / METRICS, step, first, disk, complete=True)
    timings = JsonlFile(folder / TIMINGS, step, first, disk)
    if metrics.dropped and step == first:
        disk.say(
            f"No checkpoint covers the {counted(metrics.dropped, 'step')} in {METRICS}: restarting from the first step."
        )
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
