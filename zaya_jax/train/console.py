"""What a person sees while a run goes on: a progress bar on a terminal, and a line now and then."""

import contextlib
import math
import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from zaya_jax.config import Config
from zaya_jax.config.stages import stage_at, tokens_before, total_steps
from zaya_jax.data.plan import RunPlan
from zaya_jax.hardware.data_sheets import peak_flops
from zaya_jax.hardware.environment import describe_preset
from zaya_jax.model.arithmetic import training_flops_per_token


class ConsoleReport:
    """A `MetricSink` for a person: a progress bar, and a line every `log_every` steps.

    A line has loss, bits per byte, scores of evaluators, tokens/s, FLOP/s or MFU, load entropy and ETA.
    """

    def __init__(
        self, config: Config, plan: RunPlan, start: int, device_kind: str, devices: int, *, quiet: bool = False
    ) -> None:
        """Begin or resume after step `start` of the run of `config`, which reads the data of `plan`."""
        self.labels: Mapping[str, str] = {}  # by which the scores of evaluators are printed
        self._config, self._plan, self._phase = config, plan, None
        self._steps = total_steps(config)
        peak = peak_flops(device_kind)
        self._peak = None if peak is None else peak * devices
        self._no_preset = "" if device_kind == "cpu" else "Preset: none, since jax was imported before one was set"
        self._console = Console(file=sys.stdout, highlight=False, soft_wrap=True, quiet=quiet)
        self._bar = Progress(
            TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
            console=self._console, disable=not self._console.is_terminal, transient=True,
        )  # fmt: skip
        self._task = self._bar.add_task("training", total=self._steps, completed=start)
        self._tokens, self._seconds, self._left = 0.0, 0.0, self._tokens_left(start)

    def start(self) -> None:
        """Say which preset is in force, and show the bar until `close`."""
        self._bar.start()
        if header := describe_preset() or self._no_preset:
            self.say(header)

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        # The disk that the output goes to may be full; and rich exits where the reader of a pipe has ended, as `tee`
        # does at Ctrl-C.
        with contextlib.suppress(OSError, SystemExit):
            self._console.print(text, markup=False)

    def throughput(self, step: int, tokens: float, seconds: float) -> dict[str, Any]:
        """`tokens_per_second`, `flops_per_second` and `mfu` (None if the peak of the devices is unknown) of a step."""
        speed, config = tokens / max(seconds, 1e-9), self._config
        context = stage_at(config, step - 1).context
        work = speed * training_flops_per_token(config.model, context, frozen_head=config.lora is not None)
        mfu = None if self._peak is None else work / self._peak
        return {"tokens_per_second": speed, "flops_per_second": work, "mfu": mfu}

    def write(self, metrics: dict[str, Any], timings: dict[str, Any]) -> None:
        """Take the metrics of a step, and print a line every `log_every` steps."""
        row, step = metrics, metrics["step"]
        if row["phase"] != self._phase:
            if self._phase is not None:
                self.say(f"Phase {row['phase']} begins after step {step - 1}.")
            self._phase = row["phase"]
        if "skip" in row:
            self.say(f"Step {step} changed nothing: {row['skip']} (rows {row['rows'][0]} to {row['rows'][1]}).")
        self._tokens += row["tokens"]
        self._seconds += timings["seconds"]
        self._bar.update(self._task, completed=step)
        if step % self._config.train.log_every and step != self._steps:
            return
        speed = self.throughput(step, self._tokens, self._seconds)
        per_token = self._plan.phases[stage_at(self._config, step - 1).phase].bytes_per_token
        bits = "" if per_token is None else f" | {row['loss'] / per_token / math.log(2):.3f} bits/byte"
        flops, mfu = speed["flops_per_second"], speed["mfu"]
        work = f"{flops / 1e9:.1f} GFLOP/s" if mfu is None else f"MFU {100 * mfu:.1f} %"
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

    def _tokens_left(self, step: int) -> int:
        return tokens_before(self._config, self._steps) - tokens_before(self._config, step)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
