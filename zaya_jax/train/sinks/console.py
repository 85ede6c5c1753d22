"""Console output during training: a progress bar on a terminal, and a line every `train.log_every` steps."""

import contextlib
import math
import shlex
import sys
import time
from collections.abc import Sequence
from typing import Any, TextIO, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from zaya_jax.config import Config
from zaya_jax.config.stages import stage_at, tokens_before, total_steps
from zaya_jax.data.loading.run_plan import RunPlan
from zaya_jax.errors import printable
from zaya_jax.evaluate.evaluator import Evaluator
from zaya_jax.hardware.environment import describe_preset
from zaya_jax.run.command_output import Unescaped
from zaya_jax.run.metrics import MetricSink

_MEASURED = 5  # steps that are timed before the console says how long the run takes
_LONG = 240  # seconds; for longer runs on a CPU, the console says how to shorten them
_SHORT = 120  # seconds of the shortened run
_NAME = "_short"  # with which the shortened run's folder ends
_SMOOTHING = 120.0  # seconds in which a step's weight in the ETA falls to 1/e


class ConsoleReport(MetricSink):
    """Prints a line every `train.log_every` steps and shows a progress bar on a terminal.

    A line has loss, bits per byte, evaluation scores, tokens/s, MFU (or FLOP/s), expert-load entropy and ETA.
    """

    def __init__(
        self, config: Config, plan: RunPlan, device: str, evaluators: Sequence[Evaluator] = (), *, quiet: bool = False
    ) -> None:
        """Report on the run of `config`, whose `plan` has the bytes per token, with the scores of `evaluators`.

        `device` is the kind of the devices. `quiet` prints nothing, as in processes other than the primary.
        """
        self._config, self._plan, self._phase = config, plan, None
        self._labels = {evaluator.name: evaluator.label for evaluator in evaluators}
        self._steps = total_steps(config)
        self._says_how_long = device == "cpu" and len(config.phases) == 1
        no_preset = "Preset: none, because jax was imported before zaya_jax could set it"
        self._no_preset = "" if device == "cpu" else no_preset
        self._console = Console(file=cast(TextIO, Unescaped(sys.stdout)), highlight=False, soft_wrap=True, quiet=quiet)
        columns = TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        hidden = not self._console.is_terminal
        self._bar = Progress(*columns, console=self._console, disable=hidden, transient=True)
        self._task = self._bar.add_task("training", total=self._steps)
        self._timings: list[dict[str, Any]] = []  # since the last line
        # Of the steps so far, with evaluations and saves between them; older ones count for less.
        self._tokens = self._seconds = 0.0
        self._seen = set[str]()  # names in the rows so far
        self._first_step, self._last = 0, None  # this process's first step; the last one, and when it was written

    def start(self, step: int = 0) -> None:
        """Print the active preset, and show the bar at `step` until `close`."""
        self._says_how_long &= not step  # a new run would begin at the first step
        self._bar.reset(self._task, completed=step)  # an update would count the resumed steps as speed
        self._bar.start()
        if header := describe_preset() or self._no_preset:
            self.say(header)

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        # The output's disk may be full (OSError). rich exits when the reader of a pipe has gone, as `tee` has after
        # Ctrl-C (SystemExit). Neither may end training.
        with contextlib.suppress(OSError, SystemExit):
            self._console.print("\n".join(map(printable, text.split("\n"))), markup=False)

    def write(self, metrics: dict[str, Any], timings: dict[str, Any]) -> None:
        """Record the metrics of a step, and print a line every `train.log_every` steps."""
        row, step = metrics, metrics["step"]
        if row["phase"] != self._phase:
            if self._phase is not None:
                self.say(f"Phase {row['phase']} begins after step {step - 1}.")
            self._phase = row["phase"]
        if "skip" in row:
            self.say(f"Skipped step {step}: {row['skip']} (rows {row['rows'][0]} to {row['rows'][1]}).")
        if "sample" in row:
            self.say(f"Sample after step {step}:\n{row['sample']['prompt']}{row['sample']['continuation']}")
        self._timings.append(timings)
        self._bar.update(self._task, completed=step)
        self._measure(row, timings["seconds"])
        if step % self._config.train.log_every and step != self._steps:
            return
        seconds = sum(each["seconds"] for each in self._timings)

        def mean(name: str) -> float:
            return sum(each["seconds"] * each[name] for each in self._timings) / max(seconds, 1e-9)

        per_token = self._plan.phases[stage_at(self._config, step - 1).phase].bytes_per_token
        bits = "" if per_token is None else f" | {row['loss'] / per_token / math.log(2):.3f} bits/byte"
        known = timings["mfu"] is not None
        work = f"MFU {100 * mean('mfu'):.1f} %" if known else f"{mean('flops_per_second') / 1e9:.1f} GFLOP/s"
        entropy = sum(row["load_entropy"]) / len(row["load_entropy"])
        scores = "".join(f" | {label} {row[name]:.3f}" for name, label in self._labels.items() if name in row)
        skipped = f" | skipped {row['skipped']} in a row" if row["skipped"] else ""
        speed = f"{mean('tokens_per_second'):,.0f} tokens/s | {work}"
        rest = f"load entropy {entropy:.3f} | ETA {_clock(self._seconds_left(step))}{skipped}"
        self.say(f"step {step}/{self._steps} | loss {row['loss']:.3f}{bits}{scores} | {speed} | {rest}")
        self._timings = []

    def _measure(self, row: dict[str, Any], seconds: float) -> None:
        """Add a step, with the time since the one before, or its own `seconds` if it or its scores were compiled."""
        step, now = row["step"], time.monotonic()
        before, is_first = step - 1, not row.keys() <= self._seen  # the first of all, or with a sample or a score
        self._seen.update(row)
        if self._last is not None and not is_first:
            before, seconds = self._last[0], now - self._last[1]
        weight = math.exp(-seconds / _SMOOTHING)
        tokens = tokens_before(self._config, step) - tokens_before(self._config, before)  # padding included
        self._tokens, self._seconds = weight * self._tokens + tokens, weight * self._seconds + seconds
        self._first_step, self._last = self._first_step or step, (step, now)
        if self._says_how_long and step - self._first_step == _MEASURED:
            self._say_how_long(step)

    def _say_how_long(self, step: int) -> None:
        """Say how long the run takes, and how to shorten it if that is long."""
        phase, left, seconds = self._config.phases[0], self._tokens_left(step), self._seconds_left(step)
        text = f"This run takes about {seconds / 60:.0f} minutes here."
        run_dir = self._config.run_dir.rstrip("/")
        if seconds > _LONG and "zaya_jax.main" in sys.orig_argv and not run_dir.endswith(_NAME):
            batch, warmup = self._config.batch_for(phase).tokens, phase.schedule.warmup_tokens if phase.schedule else 0
            steps = round(left * _SHORT / seconds / batch + 0.5)
            tokens = max(warmup, tokens_before(self._config, step) + steps * batch)
            added = shlex.join([f"{self._config.phase_key(0)}.tokens={tokens}", f"run_dir={run_dir}{_NAME}"])
            command = "its command (python -m zaya_jax.main …, or what started that)"
            text += f" For one of about {_SHORT // 60}, stop it with Ctrl-C, and rerun {command} with: {added}"
        if seconds > _SHORT:
            self.say(text)

    def close(self) -> None:
        """Remove the bar."""
        self._bar.stop()

    def _seconds_left(self, step: int) -> float:
        return self._tokens_left(step) * self._seconds / max(self._tokens, 1)

    def _tokens_left(self, step: int) -> int:
        return tokens_before(self._config, self._steps) - tokens_before(self._config, step)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
