"""A step in a process of its own, as it would run for its users.

In one process the sides disturb each other: PyTorch's libraries, once loaded, cost XLA a tenth of its speed
on a CPU, and each side's idle threads wait for work on the other's cores.
"""

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any


@contextlib.contextmanager
def aside(make: Callable[..., Callable[[], Any]], *arguments: Any) -> Iterator[Callable[[], Any]]:
    """`make(*arguments)`, made and called in another process.

    Args:
      make: importable by its name, as are the classes of `arguments`.
      arguments: what it takes.

    Yields:
      A function that calls the other process's step and returns its result. What the other process raises
      is raised here.
    """
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(theirs, make, arguments), daemon=True)
    process.start()
    theirs.close()  # the other process holds it: its end is the pipe's end

    def ask() -> Any:
        return answer(ours.send)

    def answer(before: Callable[[None], None] = lambda _: None) -> Any:
        try:
            before(None)
            result = ours.recv()
        except (EOFError, OSError) as error:
            process.join()
            raise RuntimeError(f"The measured process ended with status {process.exitcode}.") from error
        if isinstance(result, Exception):
            raise result
        return result

    try:
        answer()
        yield ask
    finally:
        ours.close()
        process.join()


def _serve(pipe: Connection, make: Callable[..., Callable[[], Any]], arguments: tuple[Any, ...]) -> None:
    try:
        step = make(*arguments)
        pipe.send(None)
        while True:
            pipe.recv()
            pipe.send(step())
    except EOFError:  # the other end is done
        return
    except Exception as error:
        pipe.send(error)
