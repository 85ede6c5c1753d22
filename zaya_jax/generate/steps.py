"""The compiled programs of an engine: one processes a chunk of a prompt, the other a block of decode steps."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from zaya_jax.config import ModelConfig
from zaya_jax.generate.sampling import Sampling, draw
from zaya_jax.model.zaya import Cache, Zaya, head
from zaya_jax.ops import Ops
from zaya_jax.parallel.decode import REPLICATED, ROWS, STEP_ROWS, cache_specs, empty_cache, on_shards, place
from zaya_jax.parallel.placement import Placement


class SlotState(NamedTuple):
    """The state of all slots on the devices; donated from call to call."""

    cache: Cache  # of all tokens but the newest of each row
    token_b: jax.Array  # int32, newest token of each row
    occurred_bv: jax.Array  # bool, tokens that occurred before it


class Rows(NamedTuple):
    """The requests of some rows, from the host: arrays [b]."""

    seed_b: np.ndarray  # uint32, of the random streams
    drawn_b: np.ndarray  # int32, number of tokens drawn so far
    left_b: np.ndarray  # int32, number of tokens still to draw; 0 for a row that is not decoding
    sampling: Sampling  # of fp32 arrays


class Chunk(NamedTuple):
    """A chunk of a prompt for each of n shards of the slots."""

    tokens_ns: Any  # int32, padded at the end
    count_n: np.ndarray  # int32, number of tokens without padding; 0 for a shard without a prompt
    start_n: np.ndarray  # int32, number of the prompt's tokens before the chunk
    slot_n: np.ndarray  # int32, slot of the prompt among those of its shard


Drawn = tuple[SlotState, jax.Array, jax.Array]  # new state, int32 tokens and fp32 log-probabilities


class Programs(NamedTuple):
    """The jitted programs of a model on a placement. Both donate the state, their second argument."""

    # (model's leaves, state, Chunk, Rows [n]) → Drawn [n], for rows with tokens left; others are to be ignored
    prefill: Any
    # (model's leaves, state, Rows [b], stop tokens, number of steps) → Drawn [BLOCK, b], -1 after a row's last token
    decode: Any


BLOCK = 16  # most decode steps of a call
_jit = jax.jit


@functools.lru_cache(maxsize=8)
def make_programs(structure: Any, placement: Placement, options: tuple[tuple[str, Any], ...] = ()) -> Programs:
    """Make the programs for a model of this tree structure, which every device has, with compiler options.

    They take the leaves of the model: a list of arrays is passed in a fraction of the time that a module takes.
    """
    mesh, ops = placement.mesh, placement.decode_ops

    def run(shard: Callable[..., Drawn], out: Any, leaves: Any, state: SlotState, *arguments: Any) -> Drawn:
        model = jax.tree.unflatten(structure, leaves)
        specs = state_specs(model.config, state)
        inputs = (ROWS if isinstance(argument, tuple) else REPLICATED for argument in arguments)
        on_mesh = on_shards(mesh, functools.partial(shard, ops), (REPLICATED, specs, *inputs), (specs, out, out))
        return on_mesh(model, state, *arguments)

    def _prefill(leaves: Any, state: SlotState, chunk: Chunk, rows: Rows) -> Drawn:
        return run(_prefill_shard, ROWS, leaves, state, chunk, rows)

    def _decode(leaves: Any, state: SlotState, rows: Rows, stops: jax.Array, steps: jax.Array) -> Drawn:
        return run(_decode_shard, STEP_ROWS, leaves, state, rows, stops, steps)

    settings: dict[str, Any] = {"donate_argnums": 1} | ({"compiler_options": dict(options)} if options else {})
    return Programs(_jit(_prefill, **settings), _jit(_decode, **settings))


def _prefill_shard(ops: Ops, model: Zaya, state: SlotState, chunk: Chunk, rows: Rows) -> Drawn:
    """Process the chunk of a shard in its slot, and draw the row's first token."""
    (slot,), (start,), (count,), s = chunk.slot_n, chunk.start_n, chunk.count_n, chunk.tokens_ns.shape[1]
    row = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, slot, 1), state)
    # Clear the slot: masking would keep NaN and infinity of the last request.
    row = jax.tree.map(lambda x: jnp.where((start == 0) & (count > 0), jnp.zeros_like(x), x), row)
    place_s = jnp.arange(s, dtype=jnp.int32)
    real_s = place_s < count
    seen = jnp.where(real_s, chunk.tokens_ns[0], model.config.vocab_size)  # the index of padding is dropped
    occurred_bv = row.occurred_bv.at[0, seen].set(True, mode="drop")
    segments_bs, positions_bs = real_s.astype(jnp.int32)[None], (start + place_s)[None]
    out: Any = model(chunk.tokens_ns, segments_bs, positions_bs, cache=row.cache, ops=ops)
    last_bd = jax.lax.dynamic_slice_in_dim(out.hidden_bsd[0], jnp.maximum(count - 1, 0), 1)
    token_b, logprob_b = draw(head(model, last_bd), _keys(rows, 0), rows.sampling, occurred_bv)
    after = SlotState(out.cache, jnp.where(rows.left_b > 0, token_b, row.token_b), occurred_bv)
    state = jax.tree.map(lambda x, new: jax.lax.dynamic_update_slice_in_dim(x, new, slot, 0), state, after)
    return state, token_b, logprob_b


def _decode_shard(ops: Ops, model: Zaya, state: SlotState, rows: Rows, stops: jax.Array, steps: jax.Array) -> Drawn:
    """Draw up to `steps` tokens for each row of a shard, whose loop ends when all have ended."""
    row_b, size = jnp.arange(len(rows.left_b)), (BLOCK, len(rows.left_b))

    def unfinished(carry: tuple) -> jax.Array:
        index, done_b, *_ = carry
        return (index < steps) & ~done_b.all()

    def step(carry: tuple) -> tuple:
        index, done_b, (cache, token_b, occurred_bv), tokens, logprobs = carry
        seen_b = jnp.where(done_b, model.config.vocab_size, token_b)
        occurred_bv = occurred_bv.at[row_b, seen_b].set(True, mode="drop")
        # Rows that ended are padding, which experts skip and the cache does not keep.
        segments_bs = (~done_b)[:, None].astype(jnp.int32)
        out: Any = model(token_b[:, None], segments_bs, cache.length_b[:, None], cache=cache, ops=ops)
        new_b, logprob_b = draw(head(model, out.hidden_bsd[:, 0]), _keys(rows, index), rows.sampling, occurred_bv)
        tokens, logprobs = tokens.at[index].set(jnp.where(done_b, -1, new_b)), logprobs.at[index].set(logprob_b)
        token_b = jnp.where(done_b, token_b, new_b)
        done_b |= _ended(token_b, stops) | (index + 1 >= rows.left_b)
        return index + 1, done_b, SlotState(out.cache, token_b, occurred_bv), tokens, logprobs

    done_b = _ended(state.token_b, stops) | (rows.left_b == 0)  # the first token may be a stop token
    drawn = jnp.full(size, -1, jnp.int32), jnp.zeros(size, jnp.float32)
    start = jnp.zeros((), jnp.int32), done_b, state, *drawn
    _, _, state, tokens, logprobs = jax.lax.while_loop(unfinished, step, start)
    return state, tokens, logprobs


def _keys(rows: Rows, index: jax.Array | int) -> jax.Array:
    """Return the random keys of the tokens that rows draw after `index` further ones."""
    return jax.vmap(lambda seed, drawn: jax.random.fold_in(jax.random.key(seed), drawn + index))(
        jnp.asarray(rows.seed_b), jnp.asarray(rows.drawn_b)
    )


def _ended(token_b: jax.Array, stops: jax.Array) -> jax.Array:
    return (token_b[:, None] == stops).any(-1)


def state_specs(config: ModelConfig, state: SlotState) -> SlotState:
    """Return the partition of every array of the state."""
    return SlotState(cache_specs(config, state.cache), ROWS, ROWS)  # pyright: ignore[reportArgumentType]


def empty_state(model: Zaya, slots: int, length: int, placement: Placement) -> SlotState:
    """Make the state of so many slots, of at least `length` tokens each, on the devices of `placement`."""
    config, mesh = model.config, placement.mesh
    state = _empty_state(config, slots, length, model.dtype.name, placement)
    # Where a call leaves its results; for arrays elsewhere, the next call would be compiled again.
    specs = jax.tree.leaves(model)[0].sharding if mesh.size == 1 else state_specs(config, state)
    return jax.device_put(state, specs) if mesh.size == 1 else place(mesh, state, specs)


def state_bytes(model: Zaya, slots: int, length: int, placement: Placement) -> int:
    """Return the bytes of `empty_state` on each device."""
    config, dtype = model.config, model.dtype.name
    state = jax.eval_shape(lambda: _empty_state(config, slots, length, dtype, placement))
    shardings = jax.tree.map(lambda spec: NamedSharding(placement.mesh, spec), state_specs(config, state))
    shards = jax.tree.map(lambda x, on: math.prod(on.shard_shape(x.shape)) * x.dtype.itemsize, state, shardings)
    return sum(jax.tree.leaves(shards))


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _empty_state(config: ModelConfig, slots: int, length: int, dtype: str, placement: Placement) -> SlotState:
    cache = empty_cache(config, slots, length, dtype, placement.mesh)
    return SlotState(cache, jnp.zeros(slots, jnp.int32), jnp.zeros((slots, config.vocab_size), bool))
