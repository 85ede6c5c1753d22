"""Time steps that run in separate processes, in turn.

In one process the sides would disturb each other: on a CPU, loading PyTorch's libraries slows XLA down by a tenth, and
each side's idle threads spin on the other's cores.
"""

import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import psutil

from zaya_jax.errors import InputError

SETTLE = 0.5  # seconds before a timed pass, for the other side's idle threads to stop spinning


class Passes(NamedTuple):
    """The timed passes of a step, in order."""

    seconds: list[float]
    results: list[Any]  # what each pass returned


@contextlib.contextmanager
def run_in_subprocess(
    make: Callable[..., Callable[[], Any]], *arguments: Any, seconds: float | None = None
) -> Iterator[Callable[[], Any]]:
    """Make a step with `make(*arguments)` in another process, to be called from this one.

    Args:
      make: function that returns the step; importable by name, like the classes of `arguments`.
      arguments: its arguments.
      seconds: after which it is killed, with all processes that it has started; None to wait for as long as it takes.

    Yields:
      A function that calls the step in the other process, and returns its result.

    Raises:
      InputError: the other process raised it.
      RuntimeError: the other process raised another error, ended, or was killed.
    """
    deadline = None if seconds is None else time.monotonic() + seconds
    parent_end, child_end = multiprocessing.Pipe()
    # Not a daemon: daemons may not start processes, but a step may.
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(child_end, make, arguments))
    process.start()
    child_end.close()  # so that the pipe closes when the other process ends

    def receive() -> Any:
        if deadline is not None and not parent_end.poll(max(deadline - time.monotonic(), 0)):
            _kill(process.pid)
            raise RuntimeError(f"It was ended after {seconds:g} s.")
        try:
            result = parent_end.recv()
        except (EOFError, OSError) as error:
            process.join()
            raise RuntimeError(f"The measured process exited with status {process.exitcode}.") from error
        if isinstance(result, Exception):
            raise result
        return result

    def step() -> Any:
        with contextlib.suppress(OSError):  # the process has ended; `receive` reports it
            parent_end.send(None)
        return receive()

    try:
        receive()  # wait until the step is made
        yield step
    finally:
        parent_end.close()
        process.join()


@contextlib.contextmanager
def restored_environment() -> Iterator[None]:
    """Undo changes of `os.environ` at the end of the block; processes that start inside it inherit them."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def interleave(steps: Mapping[Any, Callable[[], Any]], repeats: int) -> dict[Any, Passes]:
    """Time `repeats` passes of each step, in turn, each after an untimed pass.

    While a process waits for its turn, its data leaves the caches, and on some systems the memory; in training it does
    not.
    """
    passes = {name: Passes([], []) for name in steps}
    for _ in range(repeats):
        for name, step in steps.items():
            time.sleep(SETTLE)
            step()
            start = time.perf_counter()
            result = step()
            passes[name].seconds.append(time.perf_counter() - start)
            passes[name].results.append(result)
    return passes


def interleave_subprocesses(sides: Mapping[Any, tuple[Any, ...]], repeats: int) -> dict[Any, Passes]:
    """`interleave` steps that run in their own processes; each side holds the arguments of `run_in_subprocess`."""
    with contextlib.ExitStack() as stack:
        steps = {name: stack.enter_context(run_in_subprocess(*side)) for name, side in sides.items()}
        return interleave(steps, repeats)


def _kill(pid: int | None) -> None:
    """Kill a process, and those that it has started."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        for each in (*process.children(recursive=True), process):
            each.kill()


def _serve(pipe: Connection, make: Callable[..., Callable[[], Any]], arguments: tuple[Any, ...]) -> None:
    try:
        step = make(*arguments)
        pipe.send(None)
        while True:
            pipe.recv()
            pipe.send(step())
    except EOFError:  # the other end is closed
        return
    except InputError as error:
        pipe.send(error)
    except Exception as error:  # not every error can be sent to another process
        pipe.send(RuntimeError(f"{type(error).__name__}: {str(error).strip() or 'no message'}"[:2000]))
