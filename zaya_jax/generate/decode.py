"""Generate token ids: prefill in chunks, then blocks of decode steps, each one compiled loop on the device."""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from zaya_jax.config import ModelConfig
from zaya_jax.config.checks import counted
from zaya_jax.errors import InputError
from zaya_jax.generate.placement import FIRST_DEVICE, decode_placement
from zaya_jax.generate.sampling import Branches, Sampling, draw
from zaya_jax.model.zaya import Cache, Zaya, head, unrolled
from zaya_jax.ops import Ops
from zaya_jax.parallel.decode import REPLICATED, ROWS, STEP_ROWS, cache_specs, empty_cache, on_shards, place
from zaya_jax.parallel.mesh import AnyMesh, batch_shards
from zaya_jax.parallel.placement import Placement

Prompts = Sequence[Sequence[int]] | np.ndarray | jax.Array
CHUNK = 512  # tokens of a row that one prefill call processes
BLOCK = 16  # decode steps per compiled call
LEAST = 64  # smallest class of lengths


class Continuation(NamedTuple):
    """The text generated for a prompt, as tokens."""

    tokens: list[int]  # the new tokens, without the stop token
    logprobs: list[float]  # log-probability of each under the model, in nats, before temperature and other settings
    stopped: bool  # whether a stop token, or `stopped` of `continuations`, ended it


class DecodeState(NamedTuple):
    """The state that decoding carries from step to step; donated."""

    cache: Cache  # of all tokens so far
    logits_bv: jax.Array  # fp32, of the next token
    occurred_bv: jax.Array | None  # bool, tokens that occurred; None without a repetition penalty
    done_b: jax.Array  # bool, rows that ended
    step: jax.Array  # int32, tokens generated so far


class Block(NamedTuple):
    """The arguments of a block of decode steps."""

    keys_b: jax.Array  # random key of each row
    sampling: Sampling  # fp32 values
    stops: np.ndarray  # int32, stop tokens; -1 for none
    steps: np.int32


def generate_tokens(
    model: Zaya, prompts: Prompts, max_new_tokens: int, sampling: Sampling | None = None, **options: Any
) -> list[Continuation]:
    """Generate a continuation of each prompt; `options` are `seeds` and the other arguments of `continuations`."""
    return collections.deque(continuations(model, prompts, max_new_tokens, sampling, **options), maxlen=1).pop()


def continuations(
    model: Zaya, prompts: Prompts, max_new_tokens: int, sampling: Sampling | None = None, *,
    seeds: Sequence[int] | None = None, stop_tokens: Sequence[int] = (), placement: Placement | None = None,
    stopped: Callable[[int, list[int]], bool] | None = None, block: int = BLOCK, capacity: int | None = None,
) -> Iterator[list[Continuation]]:  # fmt: skip
    """Yield the continuations so far, after each block of steps, until all rows have ended.

    Prompts of one class of lengths share a compilation: caches have a quarter, half, three quarters or all of a power
    of two of slots, and prompts are processed in chunks of one size.

    Args:
      model: the model.
      prompts: token ids, one row for each prompt; rows may differ in length.
      max_new_tokens: largest number of tokens to add to each prompt.
      sampling: how to draw tokens; None takes the most likely one.
      seeds: seed of each row's random stream; None for 0, 1, …. A row's text depends on its own prompt and seed only.
      stop_tokens: each ends a row when it is drawn; not part of the result.
      placement: `decode_placement` or, after training, `Placement.replicated`, in the model's dtypes; the same one in
        all processes that hold the model together. None for the first device.
      stopped: called with a row's index and new tokens after each block; True ends the row.
      block: decode steps per compiled call.
      capacity: slots of the cache, at least `cache_capacity` of the longest prompt; calls with the same capacity and
        number of rows share their compilations. None for the smallest class.

    Raises:
      InputError: a prompt is empty or has a token outside the vocabulary, prompt and new tokens exceed
        `config.max_positions`, or a setting is out of range.
    """
    sampling = Sampling() if sampling is None else sampling
    rows = [list(map(int, row)) for row in prompts]
    seeds = range(len(rows)) if seeds is None else seeds
    sampling.check()
    _check(rows, seeds, stop_tokens, max_new_tokens, model.config)
    placement = decode_placement(model, FIRST_DEVICE) if placement is None else placement
    mesh = placement.mesh
    model, padding = unrolled(place(mesh, model, REPLICATED)), -len(rows) % batch_shards(mesh)
    keys_b = jax.vmap(jax.random.key)(np.array([seed % 2**32 for seed in (*seeds, *[0] * padding)], np.uint32))
    stops = np.array(sorted(set(stop_tokens)) or [-1], np.int32)
    settings = Block(keys_b, jax.tree.map(np.float32, sampling), stops, np.int32(block))
    static: dict[str, Any] = {"size": block, "branches": sampling.branches, "placement": placement}
    state = _prefilled(model, [*rows, *[[]] * padding], max_new_tokens, capacity, sampling.branches, placement)
    results = [Continuation([], [], stopped=False) for _ in rows]
    for start in range(0, max_new_tokens, block):
        steps = min(block, max_new_tokens - start)
        state, tokens, logprobs = _decode(model, state, settings._replace(steps=np.int32(steps)), **static)
        ended, new_tokens, new_logprobs = np.array(state.done_b), np.array(tokens).T, np.array(logprobs).T
        for index, before in enumerate(results):
            if before.stopped:
                continue
            new = [int(token) for token in new_tokens[index, :steps] if token >= 0]  # -1 from the stop token on
            after, scores = [*before.tokens, *new], [*before.logprobs, *new_logprobs[index, : len(new)].tolist()]
            ended[index] |= not ended[index] and stopped is not None and stopped(index, after)
            results[index] = Continuation(after, scores, bool(ended[index]))
        state = state._replace(done_b=_place_like_results(model, mesh, ended, ROWS))
        yield list(results)
        if ended.all():
            return


class GenerationPrograms(NamedTuple):
    """The compiled programs that `continuations` runs for prompts of one length, and their arguments."""

    prefill: Any  # (model, donated cache, int32 tokens [b, c], int32 segments [b, c]) → (cache, logits)
    decode: Any  # (model, donated state, block) → (state, tokens, log-probabilities); None without blocks
    empty_cache: Callable[[], Cache]
    chunks: list[tuple[np.ndarray, np.ndarray]]  # tokens and segments of each call of `prefill`
    model: Zaya  # first argument of both
    block: Block  # of `BLOCK` steps that no token stops

    def prompt(self, cache: Cache) -> tuple[Cache, jax.Array]:
        """Process the prompts into an empty cache, which is donated; returns the cache and the last logits."""
        logits = jnp.zeros(0)
        for tokens, segments in self.chunks:
            cache, logits = self.prefill(self.model, cache, tokens, segments)
        return cache, logits

    def start(self, cache: Cache, logits: jax.Array) -> DecodeState:
        """Return the state after the prompts."""
        return DecodeState(cache, logits, None, jnp.zeros(len(logits), bool), jnp.zeros((), jnp.int32))


def compile_generation(
    model: Zaya, batch: int, prompt: int, blocks: int, options: dict[str, Any] | None = None
) -> GenerationPrograms:
    """Compile greedy generation after `batch` prompts of token 0 on the first device, with compiler options.

    Prompts are rounded up to whole chunks. The cache has room for so many blocks of `BLOCK` steps; without blocks,
    `prefill` alone is compiled. InputError if both exceed `config.max_positions`.
    """
    config, chunk = model.config, min(CHUNK, _length_class(prompt))
    padded, new = -(-prompt // chunk) * chunk, blocks * BLOCK
    if padded + new > config.max_positions:
        size = f"A prompt of {prompt} tokens takes {padded} in chunks of {chunk}, and with {new} new tokens exceeds"
        raise InputError(f"{size} model.max_positions={config.max_positions}: shorten the prompt.")
    placement, model = decode_placement(model, FIRST_DEVICE), unrolled(model)
    capacity = min(_cache_class(padded + new), config.max_positions)
    empty = functools.partial(_empty_cache, config, batch, capacity, model.dtype.name, placement)
    pieces = [(np.zeros((batch, chunk), np.int32), np.ones((batch, chunk), np.int32))] * (padded // chunk)
    prefill = _prefill.lower(model, empty(), *pieces[0], placement=placement).compile(options)
    keys_b, sampling = jax.vmap(jax.random.key)(np.arange(batch, dtype=np.uint32)), Sampling()
    block = Block(keys_b, jax.tree.map(np.float32, sampling), np.array([-1], np.int32), np.int32(BLOCK))
    programs = GenerationPrograms(prefill, None, empty, pieces, model, block)
    if not blocks:
        return programs
    state = jax.eval_shape(lambda cache: programs.start(cache, jnp.zeros((batch, config.vocab_size))), empty())
    static: dict[str, Any] = {"size": BLOCK, "branches": sampling.branches, "placement": placement}
    return programs._replace(decode=_decode.lower(model, state, block, **static).compile(options))


def _check(rows: list[list[int]], seeds: Sequence[int], stops: Sequence[int], new: int, config: ModelConfig) -> None:
    if not rows or not all(rows):
        raise InputError("A prompt is empty, but must have at least one token.")
    if len(seeds) != len(rows):
        raise InputError(f"There are {len(seeds)} seeds, but must be one for each of {len(rows)} prompts.")
    for what, tokens in (("A prompt contains", itertools.chain(*rows)), ("stop_tokens contains", stops)):
        for unknown in (token for token in tokens if not 0 <= token < config.vocab_size):
            raise InputError(f"{what} token {unknown}, but tokens must be from 0 to {config.vocab_size - 1}.")
    if new < 1:
        raise InputError(f"max_new_tokens is {new}, but must be at least 1.")
    longest = max(map(len, rows))
    if longest + new > config.max_positions:
        size = f"The longest prompt ({counted(longest, 'token')}) and max_new_tokens={new} exceed"
        raise InputError(f"{size} model.max_positions={config.max_positions}. Shorten one of them.")


def _length_class(length: int) -> int:
    return max(LEAST, 1 << (length - 1).bit_length())


def cache_capacity(prompt: int, max_new_tokens: int, config: ModelConfig) -> int:
    """Return a capacity for `continuations` that is enough for prompts and continuations of so many tokens."""
    return min(_cache_class(prompt + max_new_tokens + CHUNK), config.max_positions)


def _cache_class(slots: int) -> int:
    """Round up to a class of capacities: four for each power of two, since a step reads the whole cache."""
    step = _length_class(slots) // 4
    return -(-slots // step) * step


def _prefilled(
    model: Zaya, rows: list[list[int]], new: int, capacity: int | None, branches: Branches, placement: Placement
) -> DecodeState:
    """Process the prompts, padded on the left, so that all rows continue at the same position.

    An empty prompt is a row that has ended, which makes the rows a multiple of the shards.
    """
    config, count, longest = model.config, len(rows), max(map(len, rows))
    # With a given capacity, one size of chunks for prompts of every length.
    chunk = min(CHUNK, _length_class(longest) if capacity is None else max(LEAST, capacity // 8))
    # Whole chunks, unless the model has no positions for their padding.
    padded = min(-(-longest // chunk) * chunk, (capacity or config.max_positions) - new)
    capacity = capacity or min(_cache_class(padded + new), config.max_positions)
    tokens, segments = np.zeros((2, count, padded), np.int32)
    for index, row in enumerate(rows):
        tokens[index, padded - len(row) :], segments[index, padded - len(row) :] = row, 1
    cache = _empty_cache(config, count, capacity, model.dtype.name, placement)
    cache = _place_like_results(model, placement.mesh, cache, cache_specs(config, cache))
    logits = jnp.zeros(0)
    for start in range(0, padded, chunk):
        piece = slice(start, start + chunk)
        cache, logits = _prefill(model, cache, tokens[:, piece], segments[:, piece], placement=placement)
    occurred = None
    if branches.penalizes:
        occurred = np.zeros((count, config.vocab_size), bool)
        for index, row in enumerate(rows):
            occurred[index, row] = True
        occurred = jnp.asarray(occurred)
    state = DecodeState(cache, logits, occurred, jnp.array([not row for row in rows]), jnp.zeros((), jnp.int32))
    return _place_like_results(model, placement.mesh, state, _state_specs(config, state))


def _place_like_results(model: Zaya, mesh: AnyMesh, tree: Any, specs: Any) -> Any:
    """Put arrays where a call leaves its results; for arrays elsewhere, the next call would be compiled again."""
    return place(mesh, tree, specs) if mesh.size > 1 else jax.device_put(tree, jax.tree.leaves(model)[0].sharding)


def _state_specs(config: ModelConfig, state: DecodeState) -> Any:
    specs: Any = {"logits_bv": ROWS, "occurred_bv": None if state.occurred_bv is None else ROWS, "done_b": ROWS}
    return state._replace(cache=cache_specs(config, state.cache), step=REPLICATED, **specs)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _empty_cache(config: ModelConfig, rows: int, capacity: int, dtype: str, placement: Placement) -> Cache:
    return empty_cache(config, rows, capacity, dtype, placement.mesh)


@functools.partial(jax.jit, static_argnames="placement", donate_argnums=1)
def _prefill(
    model: Zaya, cache: Cache, tokens_bs: jax.Array, segments_bs: jax.Array, *, placement: Placement
) -> tuple[Cache, jax.Array]:
    """Process one chunk; returns the cache and the fp32 logits [b, v] after its last token."""

    def shard(model: Zaya, cache: Cache, tokens_bs: jax.Array, segments_bs: jax.Array) -> tuple[Cache, jax.Array]:
        out: Any = model(tokens_bs, segments_bs, cache=cache, ops=placement.decode_ops)
        return out.cache, head(model, out.hidden_bsd[:, -1])

    specs = cache_specs(model.config, cache)
    run = on_shards(placement.mesh, shard, (REPLICATED, specs, ROWS, ROWS), (specs, ROWS))
    return run(model, cache, tokens_bs, segments_bs)


Decoded = tuple[DecodeState, jax.Array, jax.Array]


@functools.partial(jax.jit, static_argnames=("size", "branches", "placement"), donate_argnums=1)
def _decode(
    model: Zaya, state: DecodeState, block: Block, *, size: int, branches: Branches, placement: Placement
) -> Decoded:
    """Draw up to `block.steps` tokens, fewer if all rows end.

    Return the new state; int32 [size, b] tokens, -1 from a row's stop token on; and their fp32 log-probabilities.
    """
    shard = functools.partial(_decode_shard, size=size, branches=branches, ops=placement.decode_ops)
    state_specs, block_specs = _state_specs(model.config, state), (ROWS, REPLICATED, REPLICATED, REPLICATED)
    arguments, results = (REPLICATED, state_specs, *block_specs), (state_specs, STEP_ROWS, STEP_ROWS)
    return on_shards(placement.mesh, shard, arguments, results)(model, state, *block)


def _decode_shard(model: Zaya, state: DecodeState, *block: Any, size: int, branches: Branches, ops: Ops) -> Decoded:
    """Compute `_decode` for the rows of a device, whose loop ends when these have ended."""
    keys_b, sampling, stops, steps = block
    rows = jnp.arange(len(keys_b))
    length, count = state.cache.length + steps, state.step + steps

    def unfinished(carry: tuple) -> jax.Array:
        index, state, *_ = carry
        return (index < steps) & ~state.done_b.all()

    def step(carry: tuple) -> tuple:
        index, (cache, logits, occurred, done, drawn), tokens, logprobs = carry
        step_keys = jax.vmap(jax.random.fold_in, (0, None))(keys_b, drawn)
        token, logprob = draw(logits, step_keys, sampling, branches, occurred)
        done |= (token[:, None] == stops).any(-1)
        tokens, logprobs = tokens.at[index].set(jnp.where(done, -1, token)), logprobs.at[index].set(logprob)
        if occurred is not None:
            occurred = occurred.at[rows, token].set(True)
        # Rows that ended are padding from here on, which experts skip.
        out: Any = model(token[:, None], (~done)[:, None].astype(jnp.int32), cache=cache, ops=ops)
        state = DecodeState(out.cache, head(model, out.hidden_bsd[:, 0]), occurred, done, drawn + 1)
        return index + 1, state, tokens, logprobs

    tokens = jnp.full((size, len(keys_b)), -1, jnp.int32)
    start = jnp.zeros((), jnp.int32), state, tokens, jnp.zeros(tokens.shape, jnp.float32)
    _, state, tokens, logprobs = jax.lax.while_loop(unfinished, step, start)
    # Where all rows ended early, the slots of the remaining steps stay padding, so that all devices count alike.
    state = state._replace(cache=dataclasses.replace(state.cache, length=length), step=count)
    return state, tokens, logprobs
