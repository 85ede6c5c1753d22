"""Trace a window of training steps with JAX's profiler, into the run folder."""

import contextlib
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from zaya_jax.config.schema import ProfileConfig
from zaya_jax.run.files import write_atomically
from zaya_jax.run.folder import PROFILE
from zaya_jax.run.typed_name import typed_name
from zaya_jax.run.writing import hidden_folder, remove, share

PROGRAM = "step.hlo"  # in the folder: the compiled step, whose instructions the trace names
WINDOW = "window.json"  # in the folder: which steps were traced, and how long they took


class StepProfiler:
    """Traces the steps of `profile` in the primary process; without one, or elsewhere, it does nothing.

    The device is idle at both ends of the window. If the trace cannot be written, training continues without it.
    """

    def __init__(self, window: ProfileConfig | None, folder: Path, say: Callable[[str], None]) -> None:
        """Trace `window` into the run folder `folder`, and `say` where."""
        self._window, self._folder, self._say = window, folder / PROFILE, say
        self._started: tuple[int, float] | None = None  # steps done before the window, and when it began

    def warn_outside(self, done: int, last: int) -> None:
        """Say so if no step after `done` up to `last` is traced."""
        if self._window is not None and not done < self._window.start <= last:
            nothing = f"profile.start={self._window.start} traces nothing"
            self._say(f"{nothing}: this command trains steps {done + 1} to {last}.")

    def starts(self, done: int) -> bool:
        """True if the step after `done` steps is the first of the window."""
        return self._window is not None and done + 1 == self._window.start

    def start(self, done: int, state: Any, step: Callable[..., Any]) -> None:
        """Start the trace after `done` steps, which led to `state`; `step` is the compiled step."""
        jax.block_until_ready(state)
        try:
            remove(self._folder)  # an earlier trace would be read in place of this one
            hidden_folder(self._folder)
            write_atomically(self._folder / PROGRAM, program_text(step))
            start_trace(self._folder)
        except (OSError, RuntimeError, TypeError, ValueError) as error:  # the last two for paths that are not UTF-8
            self._give_up(error)
        else:
            self._started = done, time.perf_counter()

    def ends(self, done: int) -> bool:
        """True if a trace runs, and its window ends after `done` steps."""
        return self._window is not None and self.runs and done >= self._window.start - 1 + self._window.steps

    @property
    def runs(self) -> bool:
        """True if a trace runs."""
        return self._started is not None

    def stop(self, done: int, state: Any) -> None:
        """Stop the trace after `done` steps, and write how long its steps took."""
        if self._started is None:
            return
        jax.block_until_ready(state)
        (before, since), self._started = self._started, None
        devices, seconds = jax.devices(), round(time.perf_counter() - since, 6)
        window = {"first_step": before + 1, "steps": done - before, "seconds": seconds}
        window |= {"device": devices[0].device_kind, "devices": len(devices)}
        try:
            jax.profiler.stop_trace()
            share(self._folder)
            write_atomically(self._folder / WINDOW, json.dumps(window) + "\n")
        except (OSError, RuntimeError) as error:
            self._give_up(error)
        else:
            command = typed_name(f"python -m zaya_jax.machine step {self._folder.parent}")
            traced = f"Traced steps {before + 1} to {done} into {self._folder}"
            self._say(f"{traced}. To see where their time goes: {command}")

    def close(self) -> None:
        """Stop a trace whose window did not end."""
        if self.runs:
            self._started = None
            with contextlib.suppress(OSError, RuntimeError):  # the run ends with its own error, if any
                jax.profiler.stop_trace()

    def _give_up(self, error: Exception) -> None:
        self._window = None
        self._say(f"The trace could not be written to {self._folder} ({error}); training continues without it.")


def program_text(compiled: Any) -> str:
    """Return the text of a compiled program, whose fusions have the names that traces show.

    XLA copies slices beside other work (from jax 0.11 on): its text names the start of such a copy, and the trace names
    the fusion within.
    """
    names = dict[str, str]()
    with contextlib.suppress(AttributeError):  # jaxlib does not document these classes, and can do without the names
        for module in compiled.runtime_executable().hlo_modules():
            for x in (x for computation in module.computations() for x in computation.instructions()):
                if x.opcode.name == "kAsyncStart" and (wrapped := x.async_wrapped_root()).opcode.name == "kFusion":
                    names[x.name] = wrapped.name
    return re.sub(r"%([\w.\-]+)", lambda name: f"%{names.get(name[1], name[1])}", compiled.as_text())


def start_trace(folder: Path) -> None:
    """Start JAX's profiler, without Python's own calls, which are many."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    jax.profiler.start_trace(str(folder), profiler_options=options)
