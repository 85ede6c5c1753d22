"""What a person sees while a run goes on: a progress bar on a terminal, and a line now and then."""

import contextlib
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any, Self

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from zaya_jax.config import Config
from zaya_jax.config.stages import stage_at, tokens_before, total_steps
from zaya_jax.data.plan import RunPlan
from zaya_jax.hardware.data_sheets import peak_flops
from zaya_jax.hardware.environment import describe_preset
from zaya_jax.model.arithmetic import training_flops_per_token
from zaya_jax.parallel.multihost import is_primary


class ConsoleReport:
    """A `MetricSink` for a person: a progress bar, and a line every `log_every` steps.

    A line has loss, bits per byte, scores of evaluators, tokens/s, FLOP/s or MFU, load entropy and ETA.
    """

    def __init__(self, *, steps: int, start: int, log_every: int, flops_per_token: Callable[[int], float],
                 bytes_per_token: Callable[[int], float | None], tokens_left: Callable[[int], int], devices: int,
                 device_kind: str, quiet: bool = False) -> None:  # fmt: skip
        """Begin after step `start`."""
        self.labels: Mapping[str, str] = {}  # by which the scores of evaluators are printed
        self._steps, self._log_every, self._phase = steps, log_every, None
        self._flops, self._bytes, self._tokens_left = flops_per_token, bytes_per_token, tokens_left
        peak = peak_flops(device_kind)
        self._peak = None if peak is None else peak * devices
        self._no_preset = None if device_kind == "cpu" else "Preset: none, since jax was imported before one was set"
        self._console = Console(file=sys.stdout, highlight=False, soft_wrap=True, quiet=quiet)
        self._bar = Progress(
            TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
            console=self._console, disable=not self._console.is_terminal, transient=True,
        )  # fmt: skip
        self._task = self._bar.add_task("training", total=steps, completed=start)
        self._tokens, self._seconds, self._left = 0.0, 0.0, tokens_left(start)

    def __enter__(self) -> Self:
        """Say which preset is in force, and show the bar inside a `with` block."""
        self._bar.start()
        if header := describe_preset() or self._no_preset:
            self.say(header)
        return self

    def __exit__(self, *_: object) -> None:
        """Take the bar away."""
        self.close()

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        # The disk that the output goes to may be full; and rich exits where the reader of a pipe has ended, as `tee`
        # does at Ctrl-C.
        with contextlib.suppress(OSError, SystemExit):
            self._console.print(text, markup=False)

    def throughput(self, step: int, tokens: float, seconds: float) -> dict[str, Any]:
        """`tokens_per_second`, `flops_per_second` and `mfu` (None if the peak of the devices is unknown) of a step."""
        speed = tokens / max(seconds, 1e-9)
        work = speed * self._flops(step)
        mfu = None if self._peak is None else work / self._peak
        return {"tokens_per_second": speed, "flops_per_second": work, "mfu": mfu}

    def write(self, row: dict[str, Any], timings: dict[str, Any]) -> None:
        """Take the metrics of a step, and print a line every `log_every` steps."""
        step = row["step"]
        if row["phase"] != self._phase:
            if self._phase is not None:
                self.say(f"Phase {row['phase']} begins after step {step - 1}.")
            self._phase = row["phase"]
        if "skip" in row:
            self.say(f"Step {step} changed nothing: {row['skip']} (rows {row['rows'][0]} to {row['rows'][1]}).")
        self._tokens += row["tokens"]
        self._seconds += timings["seconds"]
        self._bar.update(self._task, completed=step)
        if step % self._log_every and step != self._steps:
            return
        speed = self.throughput(step, self._tokens, self._seconds)
        per_token = self._bytes(step)
        bits = "" if per_token is None else f" | {row['loss'] / per_token / math.log(2):.3f} bits/byte"
        work = (
            f"{speed['flops_per_second'] / 1e9:.1f} GFLOP/s"
            if speed["mfu"] is None
            else f"MFU {100 * speed['mfu']:.1f} %"
        )
        entropy = sum(row["load_entropy"]) / len(row["load_entropy"])
        left = self._tokens_left(step)
        eta = left * self._seconds / max(self._left - left, 1)  # by budget, which counts padding
        scores = "".join(f" | {label} {row[name]:.3f}" for name, label in self.labels.items() if name in row)
        skipped = f" | skipped {row['skipped']} in a row" if row["skipped"] else ""
        self.say(
            f"step {step}/{self._steps} | loss {row['loss']:.3f}{bits}{scores} | "
            f"{speed['tokens_per_second']:,.0f} tokens/s | {work} | load entropy {entropy:.3f} | "
            f"ETA {_clock(eta)}{skipped}"
        )
        self._tokens, self._seconds, self._left = 0.0, 0.0, left

    def sync(self) -> str:
        """There is nothing to bring to the disk."""
        return ""

    def close(self) -> None:
        """Take the bar away."""
        self._bar.stop()


def make_console(config: Config, plan: RunPlan, start: int) -> ConsoleReport:
    """The console of a run that begins or resumes after step `start`; process 0 speaks for all."""
    steps = total_steps(config)
    return ConsoleReport(
        steps=steps, start=start, log_every=config.train.log_every,
        flops_per_token=lambda step: training_flops_per_token(
            config.model, stage_at(config, step - 1).context, frozen_head=config.lora is not None
        ),
        bytes_per_token=lambda step: plan.phases[stage_at(config, step - 1).phase].bytes_per_token,
        tokens_left=lambda step: tokens_before(config, steps) - tokens_before(config, step),
        devices=jax.device_count(), device_kind=jax.devices()[0].device_kind, quiet=not is_primary(),
    )  # fmt: skip


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
