"""Log each step: one row of metrics and one of timings, to every sink."""

import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax

from zaya_jax.config import Config
from zaya_jax.config.stages import stage_at, step_rows, tokens_before
from zaya_jax.errors import Reason, RunStopped
from zaya_jax.hardware.data_sheets import peak_flops
from zaya_jax.model.arithmetic import training_flops_per_token
from zaya_jax.run.metrics import MetricSink
from zaya_jax.run.progress_record import ProgressRecord
from zaya_jax.train.spikes import REASONS

# Large metrics, which are logged every `train.log_every` steps only.
_DETAILS = ("expert_counts", "grad_norm_by_role", "update_norm_by_role", "loss_by_source")


class StepLogger:
    """Logs the steps of a run, each once, in order."""

    def __init__(self, config: Config, sinks: Sequence[MetricSink], progress: ProgressRecord | None = None) -> None:
        """Log the run of `config` to `sinks`, and tell a supervisor's `progress`."""
        self._config, self._sinks, self._progress = config, sinks, progress or ProgressRecord()
        self._devices = jax.devices()[0].device_kind, jax.device_count()
        self._running: tuple[int, Any, float] | None = None  # step, metrics on the device, seconds of data wait
        self._done: tuple[int, dict[str, Any], float, float] | None = None  # step, metrics, seconds, data wait
        self._since = time.monotonic()

    def restart_clock(self) -> None:
        """Exclude the time since the last step (compilation, evaluation, saving) from the next step's."""
        self._since = time.monotonic()

    def start_step(self, step: int, metrics: Any, data_wait: float) -> None:
        """Record the previous step, waiting for it, and remember that `step` now runs on the devices."""
        self.record()
        self._running = (step, metrics, data_wait)

    def wait(self) -> None:
        """Wait for the last step that was started, so that later work does not count as its time."""
        if self._running is None:
            return
        (step, metrics, data_wait), self._running = self._running, None
        values = jax.tree.map(lambda value: value.tolist(), jax.device_get(metrics))
        now = time.monotonic()
        self._done, self._since = (step, values, now - self._since, data_wait), now

    def add(self, values: Mapping[str, Any]) -> None:
        """Add values to the row of the last step that was started, which is recorded later."""
        self.wait()
        if self._done is not None:
            self._done[1].update(values)

    def record(self, scores: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Wait for the last step that was started, and record it with the `scores` of the model after it.

        `RunStopped` if too many steps in a row were skipped.
        """
        self.wait()
        if self._done is None:
            return
        (step, metrics, seconds, data_wait), self._done = self._done, None
        config = self._config
        phase, tokens_seen = config.phases[stage_at(config, step - 1).phase].name, tokens_before(config, step)
        row = {"step": step, "phase": phase, "tokens_seen": tokens_seen, **self._by_source(metrics)}
        if step % config.train.log_every:
            row = {name: value for name, value in row.items() if name not in _DETAILS}
        if reason := REASONS[row.pop("skip")]:
            rows = step_rows(config, step - 1)
            row |= {"skip": reason, "rows": [rows[0], rows[-1] + 1]}
        row |= scores
        timings = {"step": step, "seconds": seconds, "data_wait": data_wait}
        timings |= throughput(config, step, row["tokens"], seconds, *self._devices)
        self._progress.complete_step(step, row["loss"], row["grad_norm"])
        for sink in self._sinks:
            sink.write(row, timings)
        if row["skipped"] >= config.train.max_skipped_steps:
            limit = f"train.max_skipped_steps={config.train.max_skipped_steps} at step {step}"
            last = f"The number of skipped steps in a row reached {limit} (reason for the last one: {reason})"
            kind = Reason.NOT_FINITE if reason == REASONS[1] else Reason.SPIKE
            raise RunStopped(f"{last}. {_advice(config, reason)}", kind)

    def sync(self) -> str:
        """Flush all rows to disk; return a sentence if that fails, else ''."""
        return next(filter(None, [sink.sync() for sink in self._sinks]), "")

    def _by_source(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Return `metrics` with `loss_by_source`, in nats/token, of each source that the step read."""
        names = self._config.data.source_names
        others = {name: value for name, value in metrics.items() if name not in ("source_loss", "source_tokens")}
        if len(names) == 1:
            return {**others, "loss_by_source": {names[0]: metrics["loss"]}}
        sums = zip(names, metrics["source_loss"], metrics["source_tokens"], strict=True)
        return {**others, "loss_by_source": {name: loss / tokens for name, loss, tokens in sums if tokens}}


def throughput(config: Config, step: int, tokens: float, seconds: float, kind: str, devices: int) -> dict[str, Any]:
    """Compute the speed of `step`, counted from 1, which took `seconds`, with `tokens` in the loss.

    FLOPs include head and attention, without recomputation; `mfu` is None if the peak of the devices is not known.
    """
    speed, context, peak = tokens / max(seconds, 1e-9), stage_at(config, step - 1).context, peak_flops(kind)
    flops = speed * training_flops_per_token(config.model, context, frozen_head=config.lora is not None)
    mfu = None if peak is None else flops / (peak * devices)
    return {"tokens_per_second": speed, "flops_per_second": flops, "mfu": mfu}


def _advice(config: Config, reason: str) -> str:
    lower = "lower the learning rates or set train.compute_dtype=float32"
    new_run = f"resume in a new run_dir with resume_from={config.run_dir}, and {lower}."
    if reason == REASONS[1]:
        return f"To continue, {new_run}"
    window = config.train.spike.window
    here = "To continue in this run_dir, raise train.spike.threshold or set train.spike.window=0."
    settled = f"If the loss has settled at a new level, set train.max_skipped_steps above train.spike.window={window}"
    return f"{here} {settled}: after that many similar skipped steps, the new level becomes the baseline. Or {new_run}"
