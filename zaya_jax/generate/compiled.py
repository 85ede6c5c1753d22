"""The programs of an engine, compiled ahead for prompts of one length, to be measured."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from zaya_jax.errors import InputError
from zaya_jax.generate.engine import CHUNK, capacity_class, make_rows
from zaya_jax.generate.placement import FIRST_DEVICE, decode_placement
from zaya_jax.generate.steps import BLOCK, Chunk, Rows, SlotState, empty_state, make_programs
from zaya_jax.model.zaya import Zaya, unrolled


class GenerationPrograms(NamedTuple):
    """Compiled programs of an `Engine` for prompts of one length, in equal chunks, and their arguments.

    An engine itself takes shorter chunks for the end of a prompt.
    """

    prefill: Any  # see `steps.Programs`
    decode: Any  # None without blocks
    leaves: list[jax.Array]  # of the model, first argument of both
    empty_state: Callable[[], SlotState]
    chunks: list[tuple[Chunk, Rows]]  # arguments of each call of `prefill`
    block: tuple[Rows, np.ndarray, np.int32]  # arguments of `decode`, of `BLOCK` steps that no token stops

    def prompt(self, state: SlotState) -> SlotState:
        """Process the prompts into an empty state, which is donated; returns the state after them."""
        for chunk, rows in self.chunks:
            state, *_ = self.prefill(self.leaves, state, chunk, rows)
        return state


def compile_generation(
    model: Zaya, batch: int, prompt: int, blocks: int, options: dict[str, Any] | None = None
) -> GenerationPrograms:
    """Compile greedy generation after `batch` prompts of token 0 on the first device, with compiler options.

    Prompts are rounded up to whole chunks. The cache has room for so many blocks of `BLOCK` steps; without blocks,
    `prefill` alone is compiled. InputError if both exceed `config.max_positions`.
    """
    config, size = model.config, min(CHUNK, capacity_class(prompt))
    padded, new = -(-prompt // size) * size, blocks * BLOCK
    if padded + new > config.max_positions:
        length = f"A prompt of {prompt} tokens takes {padded} in chunks of {size}, and with {new} new tokens exceeds"
        raise InputError(f"{length} model.max_positions={config.max_positions}: shorten the prompt.")
    placement, model = decode_placement(model, FIRST_DEVICE), unrolled(model)
    leaves, structure = jax.tree.flatten(model)
    programs, capacity = make_programs(structure, placement), min(capacity_class(padded + new), config.max_positions)

    def empty() -> SlotState:
        return empty_state(model, batch, capacity, placement)

    tokens, count = np.zeros((1, size), np.int32), np.array([size], np.int32)
    places = [(start, slot) for slot in range(batch) for start in range(0, padded, size)]
    starts = [tuple(np.array([value], np.int32) for value in place) for place in places]
    chunks = [(Chunk(tokens, count, *place), make_rows([None], [0], [0])) for place in starts]
    block = make_rows([None] * batch, [0] * batch, [BLOCK + 1] * batch), np.array([-1], np.int32), np.int32(BLOCK)
    state = jax.eval_shape(empty)
    prefill = programs.prefill.lower(leaves, state, *chunks[0]).compile(options)
    decode = programs.decode.lower(leaves, state, *block).compile(options) if blocks else None
    return GenerationPrograms(prefill, decode, leaves, empty, chunks, block)
