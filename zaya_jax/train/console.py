"""What a person sees while a run goes on: a progress bar on a terminal, and a line now and then."""

import math
import sys
import time
from collections.abc import Callable
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from zaya_jax.config.hardware import peak_of
from zaya_jax.config.presets import describe_preset


class ConsoleReport:
    """Prints every `log_every` steps: loss, bits per byte, tokens/s, FLOP/s or MFU, load entropy, ETA."""

    def __init__(self, *, steps: int, start: int, log_every: int, flops_per_token: Callable[[int], float],
                 bytes_per_token: Callable[[int], float | None], tokens_left: Callable[[int], int], devices: int,
                 device_kind: str, quiet: bool = False) -> None:  # fmt: skip
        self._steps, self._log_every, self._phase = steps, log_every, None
        self._flops, self._bytes, self._tokens_left = flops_per_token, bytes_per_token, tokens_left
        peak = peak_of(device_kind)
        self._peak = None if peak is None else peak * devices
        self._no_preset = None if device_kind == "cpu" else "Preset: none, since jax was imported before one was set"
        self._console = Console(file=sys.stdout, highlight=False, soft_wrap=True, quiet=quiet)
        self._bar = Progress(
            TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
            console=self._console, disable=not self._console.is_terminal, transient=True,
        )  # fmt: skip
        self._task = self._bar.add_task("training", total=steps, completed=start)
        self._tokens, self._since = 0.0, time.monotonic()

    def __enter__(self) -> Self:
        """Say which preset is in force, and show the bar inside a `with` block."""
        self._bar.start()
        if header := describe_preset() or self._no_preset:
            self.say(header)
        return self

    def __exit__(self, *_: object) -> None:
        """Take the bar away."""
        self._bar.stop()

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self._console.print(text, markup=False)

    def restart_clock(self) -> None:
        """Leave what happened until now (compilation, evaluation, saving) out of the speed."""
        self._tokens, self._since = 0.0, time.monotonic()

    def row(self, row: dict[str, Any]) -> None:
        """Take note of one step's metrics, and print them when it is time."""
        step = row["step"]
        if row["phase"] != self._phase:
            if self._phase is not None:
                self.say(f"Phase {row['phase']} begins after step {step - 1}.")
            self._phase = row["phase"]
        if "skip" in row:
            self.say(f"Step {step} changed nothing: {row['skip']} (rows {row['rows'][0]} to {row['rows'][1]}).")
        self._tokens += row["tokens"]
        self._bar.update(self._task, completed=step)
        if step % self._log_every and step != self._steps:
            return
        seconds = max(time.monotonic() - self._since, 1e-9)
        speed = self._tokens / seconds
        per_token = self._bytes(step)
        bits = "" if per_token is None else f" | {row['loss'] / per_token / math.log(2):.3f} bits/byte"
        work = speed * self._flops(step)
        share = f"{work / 1e9:.1f} GFLOP/s" if self._peak is None else f"MFU {100 * work / self._peak:.1f} %"
        entropy = sum(row["load_entropy"]) / len(row["load_entropy"])
        left = self._tokens_left(step) / speed if speed else 0.0
        held = f" | held-out {row['heldout_loss']:.3f}" if "heldout_loss" in row else ""
        skipped = f" | skipped {row['skipped']} in a row" if row["skipped"] else ""
        self.say(
            f"step {step}/{self._steps} | loss {row['loss']:.3f}{bits}{held} | "
            f"{speed:,.0f} tokens/s | {share} | load entropy {entropy:.3f} | ETA {_clock(left)}{skipped}"
        )
        self.restart_clock()


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
