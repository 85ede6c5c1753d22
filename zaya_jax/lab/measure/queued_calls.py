"""Queue calls on a device for `timing`, several in one program."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from zaya_jax.lab.measure.timing import repeated

TOGETHER = 8  # calls in one program, so that launching does not dominate short kernels
SHORT = 2**28  # bytes of arrays below which a call counts as short


class Queue:
    """Calls of a function whose first `held` arguments are donated, and take the first `held` outputs.

    Without held arguments, a program has several short calls, each with its own arrays: with shared arrays, the
    compiler would compute the result only once, and the second call would find them in the cache. Emulated kernels are
    never short.
    """

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...], held: int = 0) -> None:
        """Copy the arguments as often as a program calls the function."""
        is_short = sum(leaf.nbytes for leaf in jax.tree.leaves(arguments)) < SHORT
        self.calls = TOGETHER if is_short and not held and jax.default_backend() != "cpu" else 1
        sets = [arguments, *(jax.tree.map(jnp.copy, arguments) for _ in range(self.calls - 1))]
        self._held, self._state = held, [each[:held] for each in sets]
        self._inputs, self._last = [each[held:] for each in sets], []

        def program(state: Any, inputs: Any, further: Any) -> list[Any]:
            return [function(*first, *rest, *further) for first, rest in zip(state, inputs, strict=True)]

        self._run = jax.jit(program, donate_argnums=0)

    def make_pass(self, *further: Any) -> Callable[[], int]:
        """Make a pass of `timing.repeated`; `further` arguments follow the others."""

        def call() -> None:
            self._last = self._run(self._state, self._inputs, further)
            if self._held:
                self._state = [outputs[: self._held] for outputs in self._last]

        return repeated(call, lambda: jax.block_until_ready(self._last), self.calls)
