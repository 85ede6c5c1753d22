"""Steps in separate processes, as they would run for their users, timed in turn.

In one process the sides disturb each other: PyTorch's libraries, once loaded, cost XLA a tenth of its speed
on a CPU, and each side's idle threads wait for work on the other's cores.
"""

import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from zaya_jax.errors import InputError

SETTLE = 0.5  # seconds before a timed pass, in which the other side's idle threads stop waiting on the cores


class Passes(NamedTuple):
    """The timed passes of a step, in order."""

    seconds: list[float]
    results: list[Any]  # what it returned


@contextlib.contextmanager
def run_in_subprocess(make: Callable[..., Callable[[], Any]], *arguments: Any) -> Iterator[Callable[[], Any]]:
    """`make(*arguments)`, made and called in another process.

    Args:
      make: importable by its name, as are the classes of `arguments`.
      arguments: what it takes.

    Yields:
      A function that calls the other process's step and returns its result.

    Raises:
      InputError: the other process raised it.
      RuntimeError: the other process raised another error, or ended.
    """
    parent_end, child_end = multiprocessing.Pipe()
    # No daemon, since those may not start processes, and a step may.
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(child_end, make, arguments))
    process.start()
    child_end.close()  # the other process holds it: its end is the pipe's end

    def receive() -> Any:
        try:
            result = parent_end.recv()
        except (EOFError, OSError) as error:
            process.join()
            raise RuntimeError(f"The measured process exited with status {process.exitcode}.") from error
        if isinstance(result, Exception):
            raise result
        return result

    def step() -> Any:
        with contextlib.suppress(OSError):  # a process that has ended, which `receive` reports
            parent_end.send(None)
        return receive()

    try:
        receive()  # that the step is made
        yield step
    finally:
        parent_end.close()
        process.join()


@contextlib.contextmanager
def restored_environment() -> Iterator[None]:
    """Changes of `os.environ` inside the block are for the processes that start there, and end with it."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def interleave(steps: Mapping[Any, Callable[[], Any]], repeats: int) -> dict[Any, Passes]:
    """Time each step, one after the other in turn, after one pass of each to warm up."""
    passes = {name: Passes([], []) for name in steps}
    for step in steps.values():
        step()
    for _ in range(repeats):
        for name, step in steps.items():
            time.sleep(SETTLE)
            start = time.perf_counter()
            result = step()
            passes[name].seconds.append(time.perf_counter() - start)
            passes[name].results.append(result)
    return passes


def interleave_subprocesses(sides: Mapping[Any, tuple[Any, ...]], repeats: int) -> dict[Any, Passes]:
    """`interleave` the steps of `sides`, each made in its own process; a side is what `run_in_subprocess` takes."""
    with contextlib.ExitStack() as stack:
        steps = {name: stack.enter_context(run_in_subprocess(*side)) for name, side in sides.items()}
        return interleave(steps, repeats)


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
