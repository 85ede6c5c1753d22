"""The sink that puts the results of each step into the progress record."""

from typing import Any

from zaya_jax.run.progress_record import ProgressRecord


class ProgressSink:
    """Puts the step, loss and gradient norm of each step into the progress record of this process."""

    def __init__(self, progress: ProgressRecord) -> None:
        """Write to `progress`."""
        self._progress = progress

    def write(self, metrics: dict[str, Any], timings: dict[str, Any]) -> None:
        """Record a step."""
        self._progress.complete_step(metrics["step"], metrics["loss"], metrics["grad_norm"])

    def sync(self) -> str:
        """Do nothing: the record is memory."""
        return ""

    def close(self) -> None:
        """Do nothing: the record lasts as long as the process."""
