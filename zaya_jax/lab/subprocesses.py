"""Run steps in separate processes.

In one they disturb each other: PyTorch's libraries slow XLA on CPUs by a tenth, and idle threads spin on their cores.
"""

import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import psutil

from zaya_jax.errors import InputError


@contextlib.contextmanager
def run_in_subprocess(
    make: Callable[..., Callable[[], Any]], *arguments: Any, seconds: float | None = None
) -> Iterator[Callable[[], Any]]:
    """Make a step with `make(*arguments)` in another process; yields a function that calls it and returns its result.

    `make` and the arguments' classes are importable by name. After `seconds`, if not None, the process is killed with
    all that it started. An `InputError` there is raised here; RuntimeError for others, or if the process ended.
    """
    deadline = None if seconds is None else time.monotonic() + seconds
    parent_end, child_end = multiprocessing.Pipe()
    # Not a daemon: daemons may not start processes, but a step may.
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(child_end, make, arguments))
    process.start()
    child_end.close()  # so that the pipe closes when the other process ends

    def receive() -> Any:
        if deadline is not None and not parent_end.poll(max(deadline - time.monotonic(), 0)):
            with contextlib.suppress(psutil.Error):
                started = psutil.Process(process.pid).children(recursive=True)
                for each in (*started, process):
                    each.kill()
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
