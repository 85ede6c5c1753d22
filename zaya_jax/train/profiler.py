"""Trace a window of training steps with JAX's profiler, into the run folder."""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from zaya_jax.config.schema import ProfileConfig
from zaya_jax.run.files import write_atomically
from zaya_jax.run.folder import PROFILE

PROGRAM = "step.hlo"  # in the folder: the compiled step, whose instructions the trace names
WINDOW = "window.json"  # in the folder: which steps were traced, and how long they took


class StepProfiler:
    """Traces the steps of `profile` in the primary process; without one, or elsewhere, it does nothing.

    The device is idle at both ends of the window, so that its time is that of whole steps.
    """

    def __init__(self, window: ProfileConfig | None, folder: Path, say: Callable[[str], None]) -> None:
        """Trace `window` into the run folder `folder`, and `say` where."""
        self._window, self._folder, self._say = window, folder / PROFILE, say
        self._started: tuple[int, float] | None = None  # steps done before the window, and when it began

    def start_if_due(self, done: int, state: Any, step: Callable[..., Any]) -> None:
        """Start the trace if the step after `done` steps is the first of the window.

        Args:
          done: number of steps done.
          state: training state after them.
          step: the compiled step.
        """
        if self._window is None or done + 1 != self._window.start:
            return
        jax.block_until_ready(state)
        shutil.rmtree(self._folder, ignore_errors=True)  # of an earlier trace, which would be read in place of this one
        self._folder.mkdir(parents=True)
        write_atomically(self._folder / PROGRAM, step.as_text())  # pyright: ignore[reportFunctionMemberAccess]
        start_trace(self._folder)
        self._started = done, time.perf_counter()

    def is_done(self, done: int, end: int) -> bool:
        """Whether a trace runs, and `done` steps are all of its window, or all up to `end`, where the program ends."""
        if self._window is None or self._started is None:
            return False
        return done >= min(self._window.start - 1 + self._window.steps, end)

    def stop(self, done: int, state: Any) -> None:
        """Stop the trace after `done` steps, and write how long its steps took."""
        if self._started is None:
            return
        jax.block_until_ready(state)
        (before, since), self._started = self._started, None
        seconds = time.perf_counter() - since
        jax.profiler.stop_trace()
        window = {"first_step": before + 1, "steps": done - before, "seconds": round(seconds, 6)}
        write_atomically(self._folder / WINDOW, json.dumps(window) + "\n")
        self._say(f"Traced steps {before + 1} to {done} into {self._folder}. To see where their time goes: "
                  f"python -m zaya_jax.machine step {self._folder.parent}")  # fmt: skip

    def close(self) -> None:
        """Stop a trace whose window did not end."""
        if self._started is not None:
            self._started = None
            jax.profiler.stop_trace()


def start_trace(folder: Path) -> None:
    """Start JAX's profiler, without Python's own calls, which are many."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    jax.profiler.start_trace(str(folder), profiler_options=options)
