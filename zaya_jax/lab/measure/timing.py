"""The timer of all measurements; its statistic is the median. Only `Queue` imports jax, which would disturb a peer."""

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from zaya_jax.lab.subprocesses import run_in_subprocess

PASS = 0.1  # seconds that a pass of `repeated` takes at least, with at most `MOST` calls
MOST = 1000
TOGETHER = 8  # calls in one program, so that launching does not dominate short kernels
SHORT = 2**28  # bytes of arrays below which a call counts as short
SETTLE = 0.5  # seconds before a timed pass, for the idle threads of the other side to stop spinning


class Timing(NamedTuple):
    """Timed calls."""

    median: float  # seconds
    seconds: list[float]  # of each call, in order


class Passes(NamedTuple):
    """The timed passes of one of several steps, in order."""

    seconds: list[float]
    results: list[Any]  # what each pass returned


def elapsed(call: Callable[[], object]) -> float:
    """Return the seconds of a call, which must wait for what it starts."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def time_calls(
    call: Callable[[], object], repeats: int, warm_up: int = 1, before: Callable[[], object] = lambda: None
) -> Timing:
    """Time `repeats` calls, after `warm_up` others; `before` runs untimed before each."""
    seconds = []
    for _ in range(warm_up + repeats):
        before()
        seconds.append(elapsed(call))
    return Timing(statistics.median(seconds[warm_up:]), seconds[warm_up:])


def interleave(steps: Mapping[Any, Callable[[], Any]], repeats: int) -> dict[Any, Passes]:
    """Time `repeats` passes of each step, in turn, each after an untimed pass, since caches go cold in between."""
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
    """`interleave` steps in their own processes; each side holds the arguments of `run_in_subprocess`."""
    with contextlib.ExitStack() as stack:
        steps = {name: stack.enter_context(run_in_subprocess(*side)) for name, side in sides.items()}
        return interleave(steps, repeats)


def repeated(call: Callable[[], Any], wait: Callable[[], Any], counts: int) -> Callable[[], int]:
    """Make a pass of calls that take `PASS` seconds, so that launches count little; it returns `counts` of each."""
    number = 1

    def one_pass() -> int:
        for _ in range(number):
            call()
        wait()
        return number * counts

    one_pass()  # compiles
    while number < MOST and (seconds := elapsed(one_pass)) < PASS:
        number = min(MOST, max(2 * number, math.ceil(number * PASS / max(seconds, 1e-6))))
    return one_pass


class Queue:
    """Calls of a function whose first `held` arguments are donated, and take the first `held` outputs.

    Without held arguments, a program has several short calls, each with its own arrays: otherwise the compiler would
    compute once, or the second call find them in the cache. Emulated kernels are never short.
    """

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...], held: int = 0) -> None:
        """Copy the arguments as often as a program calls the function."""
        import jax
        import jax.numpy as jnp

        is_short = sum(leaf.nbytes for leaf in jax.tree.leaves(arguments)) < SHORT
        self.calls = TOGETHER if is_short and not held and jax.default_backend() != "cpu" else 1
        sets = [arguments, *(jax.tree.map(jnp.copy, arguments) for _ in range(self.calls - 1))]
        self._held, self._state = held, [each[:held] for each in sets]
        self._inputs, self._last = [each[held:] for each in sets], []

        def program(state: Any, inputs: Any, further: Any) -> list[Any]:
            return [function(*first, *rest, *further) for first, rest in zip(state, inputs, strict=True)]

        self._run = jax.jit(program, donate_argnums=0)

    def make_pass(self, *further: Any) -> Callable[[], int]:
        """Make a pass of `repeated`; `further` arguments follow the others."""
        import jax

        def call() -> None:
            self._last = self._run(self._state, self._inputs, further)
            if self._held:  # and nothing else, which would take memory during the next call
                self._last = self._state = [outputs[: self._held] for outputs in self._last]

        return repeated(call, lambda: jax.block_until_ready(self._last), self.calls)
