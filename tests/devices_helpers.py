"""A process that simulates CPU devices and calls functions for the tests: `python -m tests.devices_helpers`."""

import contextlib
import importlib
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


class Devices:
    """The process, which ends with this one; calls come one after the other."""

    def __init__(self, count: int) -> None:
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 (as long as the process)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.devices_helpers"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._said, env={**os.environ, "JAX_NUM_CPU_DEVICES": str(count)},
        )  # fmt: skip

    def call(self, function: str, arguments: tuple[Any, ...], seconds: float = 300) -> Any:
        """What `function` ("module:name") returns; an `AssertionError` with what was said where it raises or hangs."""
        asks, answers = self._process.stdin, self._process.stdout
        assert asks is not None
        assert answers is not None
        limit = threading.Timer(seconds, self._process.kill)
        limit.start()
        try:
            pickle.dump((function, arguments), asks)
            asks.flush()
            done, result = pickle.load(answers)  # noqa: S301 (written a moment ago)
        except (EOFError, OSError, pickle.UnpicklingError) as error:
            done, result = False, f"It ended: {error!r}, status {self._process.wait()}"
        finally:
            limit.cancel()
        assert done, f"{result}\n{self._words()}"
        return result

    def _words(self) -> str:
        self._said.seek(0)
        return self._said.read().decode(errors="replace")

    def close(self) -> None:
        """End the process."""
        with contextlib.suppress(BrokenPipeError), self._process as process:
            process.kill()
        self._said.close()


_there: dict[int, Devices] = {}


def on_devices(count: int, function: str, *arguments: Any) -> Any:
    """Call `function` ("module:name") where there are `count` simulated CPU devices; returns what it returns.

    The process is there for later calls too, since importing jax takes longer than most of them: a function leaves
    settings as they were. After a failure the next call has a new one.
    """
    if count not in _there:
        _there[count] = Devices(count)
    try:
        return _there[count].call(function, arguments)
    except BaseException:
        _there.pop(count).close()
        raise


def close_devices() -> None:
    """End all processes that `on_devices` has started."""
    while _there:
        _there.popitem()[1].close()


def _serve() -> None:
    """Answer calls until there are no more; what functions print goes to the standard error."""
    import jax

    asks, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while True:
        try:
            function, arguments = pickle.load(asks)  # noqa: S301 (of the tests)
        except EOFError:
            return
        module, _, name = function.partition(":")
        try:
            result = True, getattr(importlib.import_module(module), name)(*arguments)
        except Exception:
            result = False, traceback.format_exc()
        pickle.dump(result, answers)
        answers.flush()
        del result
        jax.clear_caches()  # else what all calls have compiled adds up


if __name__ == "__main__":
    _serve()
