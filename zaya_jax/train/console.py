"""What a person sees while a run goes on: a progress bar on a terminal, and a line now and then."""

import contextlib
import math
import sys
from collections.abc import Callable
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from zaya_jax.hardware.data_sheets import peak_flops
from zaya_jax.hardware.environment import describe_preset


class ConsoleReport:
    """Prints every `log_every` steps: loss, bits per byte, tokens/s, FLOP/s or MFU, load entropy, ETA."""

    def __init__(self, *, steps: int, start: int, log_every: int, flops_per_token: Callable[[int], float],
                 bytes_per_token: Callable[[int], float | None], tokens_left: Callable[[int], int], devices: int,
                 device_kind: str, quiet: bool = False) -> None:  # fmt: skip
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
        self._bar.stop()

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

    def row(self, row: dict[str, Any], seconds: float) -> None:
        """Take the metrics of a step that took `seconds`, and print a line every `log_every` steps."""
        step = row["step"]
        if row["phase"] != self._phase:
            if self._phase is not None:
                self.say(f"Phase {row['phase']} begins after step {step - 1}.")
            self._phase = row["phase"]
        if "skip" in row:
            self.say(f"Step {step} changed nothing: {row['skip']} (rows {row['rows'][0]} to {row['rows'][1]}).")
        self._tokens += row["tokens"]
        self._seconds += seconds
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
        held = f" | held-out {row['heldout_loss']:.3f}" if "heldout_loss" in row else ""
        skipped = f" | skipped {row['skipped']} in a row" if row["skipped"] else ""
        self.say(
            f"step {step}/{self._steps} | loss {row['loss']:.3f}{bits}{held} | "
            f"{speed['tokens_per_second']:,.0f} tokens/s | {work} | load entropy {entropy:.3f} | "
            f"ETA {_clock(eta)}{skipped}"
        )
        self._tokens, self._seconds, self._left = 0.0, 0.0, left


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
