"""Continue a list of prompts, as token ids, with an engine."""

import collections
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from zaya_jax.errors import InputError
from zaya_jax.generate.engine import NOTHING, SLOTS, Continuation, Engine
from zaya_jax.generate.sampling import Sampling
from zaya_jax.generate.steps import BLOCK
from zaya_jax.model.zaya import Zaya
from zaya_jax.parallel.placement import Placement

Prompts = Sequence[Sequence[int]] | np.ndarray | jax.Array


def generate_tokens(
    model: Zaya, prompts: Prompts, max_new_tokens: int, sampling: Sampling | None = None, *,
    stop_tokens: Iterable[int] = (), placement: Placement | None = None, **options: Any,
) -> list[Continuation]:  # fmt: skip
    """Generate a continuation of each prompt.

    `placement` and `stop_tokens` are those of `Engine`, the other arguments and `options` those of `continuations`. To
    generate repeatedly, call that with an `Engine`: each call here selects kernels and places the parameters again.
    """
    engine = Engine(model, placement, slots=1, length=1, stop_tokens=stop_tokens)
    blocks = continuations(engine, [list(row) for row in prompts], max_new_tokens, sampling, **options)
    return collections.deque(blocks, maxlen=1).pop()


def reserve_slots(engine: Engine, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    """Make room for these prompts and their continuations, `SLOTS` at most at a time; see `Engine.reserve`."""
    engine.reserve(min(len(prompts), SLOTS), max(1, max(map(len, prompts)) + max_new_tokens))


def continuations(
    engine: Engine, prompts: Sequence[Sequence[int]], max_new_tokens: int, sampling: Sampling | None = None, *,
    seeds: Sequence[int] | None = None, stopped: Callable[[int, list[int]], bool] | None = None, block: int = BLOCK,
) -> Iterator[list[Continuation]]:  # fmt: skip
    """Yield the continuations so far, after each block of steps, until all have ended; a caller may end before.

    Args:
      engine: an engine without other requests; see `reserve_slots`.
      prompts: token ids, one row for each prompt; rows may differ in length.
      max_new_tokens: largest number of tokens to add to each prompt.
      sampling: how to draw tokens; None takes the most likely one.
      seeds: seed of each row's random stream; None for 0, 1, …. A row's text
        depends on its prompt, seed and sampling, and on the engine's slots and length.
      stopped: called with a row's index and new tokens after each block; True ends the row.
      block: most decode steps until the next yield.

    InputError if there is not one seed a prompt, and see `Engine.submit`.
    """
    if not prompts:
        raise InputError("The list of prompts is empty, but must have at least one.")
    seeds = range(len(prompts)) if seeds is None else seeds
    if len(seeds) != len(prompts):
        raise InputError(f"There are {len(seeds)} seeds, but must be one for each of {len(prompts)} prompts.")
    reserve_slots(engine, prompts, max_new_tokens)
    rows, results = dict[int, int](), [NOTHING] * len(prompts)
    try:
        for index, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
            ends = None if stopped is None else functools.partial(stopped, index)
            rows[engine.submit(prompt, max_new_tokens, sampling, seed=seed, stopped=ends)] = index
        while engine.busy:
            for update in engine.step(block):
                results[rows[update.handle]] = update.continuation
            yield list(results)
    finally:
        for handle in rows:
            engine.cancel(handle)
