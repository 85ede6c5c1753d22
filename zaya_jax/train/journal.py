"""What is noted of each step: a row of `metrics.jsonl`, and what a person sees."""

from typing import Any

import jax

from zaya_jax.config import Config
from zaya_jax.config.stages import rows_before, stage_at, tokens_before
from zaya_jax.errors import RunStopped
from zaya_jax.train.console import ConsoleReport
from zaya_jax.train.evaluate import HeldoutLoss, together
from zaya_jax.train.spikes import REASONS
from zaya_jax.train.tracker import JsonlTracker, NoTracker


class Journal:
    """Notes the steps of a run, each once, in order."""

    def __init__(self, config: Config, tracker: JsonlTracker | NoTracker, report: ConsoleReport) -> None:
        self._config, self._tracker, self._report = config, tracker, report
        self._pending: tuple[int, Any] | None = None  # the step that may still be running

    def begun(self, step: int, metrics: Any) -> None:
        """Take note that `step` runs; the one before is read now, which waits for it alone."""
        self.settle()
        self._pending = (step, metrics)

    def settle(self, heldout: dict[str, HeldoutLoss] | None = None) -> None:
        """Read the last step that was begun, which waits for it, and note it with the held-out losses after it.

        Raises:
          RunStopped: too many steps in a row were skipped.
        """
        if self._pending is None:
            return
        (step, metrics), self._pending = self._pending, None
        config, most = self._config, self._config.train.max_skipped_steps
        row = {"step": step, "phase": config.phases[stage_at(config, step - 1).phase].name,
               "tokens_seen": tokens_before(config, step),
               **{name: value.tolist() for name, value in jax.device_get(metrics).items()}}  # fmt: skip
        reason = REASONS[row.pop("skip")]
        if reason:
            row |= {"skip": reason, "rows": [rows_before(config, step - 1), rows_before(config, step)]}
        if heldout is not None:
            row["heldout_loss"] = together(heldout).nats_per_token
            if len(heldout) > 1:
                row["heldout_loss_of"] = {name: loss.nats_per_token for name, loss in heldout.items()}
        self._tracker.log(row)
        self._report.row(row)
        if row["skipped"] >= most:
            raise RunStopped(
                f"{row['skipped']} steps in a row, up to step {step}, were skipped, the last one for: {reason}, and "
                f"nothing was learned from them. {_advice(config, reason)}"
            )


def _advice(config: Config, reason: str) -> str:
    elsewhere = (f"with resume_from={config.run_dir} in a new run_dir, try lower learning rates or "
                 "train.compute_dtype=float32.")  # fmt: skip
    if reason == REASONS[1]:
        return f"To continue {elsewhere}"
    window = config.train.spike.window
    return ("To continue in this run_dir, raise train.spike.threshold, set train.spike.window=0, or, where the loss "
            f"stays at its new level, set train.max_skipped_steps above train.spike.window ({window}): {window} "
            f"skipped steps that agree become the new baseline. Or, {elsewhere}")  # fmt: skip
