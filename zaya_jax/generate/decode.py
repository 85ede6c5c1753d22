"""Generate text: prefill and the whole decode loop in one compiled function."""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from zaya_jax.config import ModelConfig, ParallelConfig
from zaya_jax.errors import InputError
from zaya_jax.model.tree import roles, shapes
from zaya_jax.model.zaya import Zaya, abstract_model, head, init_cache
from zaya_jax.ops.registry import validate_kernels
from zaya_jax.parallel.mesh import make_mesh
from zaya_jax.parallel.placement import Placement, device_kernels, make_placement


def generate_text(
    model: Zaya,
    prompt_tokens: Sequence[Sequence[int]] | np.ndarray | jax.Array,
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    stop_token: int | None = None,
    key: jax.Array | None = None,
    placement: Placement | None = None,
) -> list[list[int]]:
    """Generate a continuation of each prompt.

    Args:
      model: the model.
      prompt_tokens: token ids, one row for each prompt; rows may differ in length.
      max_new_tokens: largest number of tokens to add to each prompt.
      temperature: sampling temperature; 0 takes the most likely token.
      stop_token: ends a row when it is sampled; not part of the result.
      key: random key; required if `temperature` is above 0.
      placement: replicated placement (`Placement.replicated`) in the model's dtypes. Several processes that hold the
        model together must pass the same one. None to use the first device, with kernels validated at the first call.

    Returns:
      The new tokens of each row.

    Raises:
      InputError: a prompt is empty or contains a token outside the vocabulary, prompt and new tokens exceed
        `config.max_positions`, or the key is missing.
    """
    rows = [[int(token) for token in row] for row in prompt_tokens]
    config = model.config
    if not rows or not all(rows):
        raise InputError("A prompt is empty, but must have at least one token.")
    if unknown := [token for row in rows for token in row if not 0 <= token < config.vocab_size]:
        raise InputError(f"A prompt contains token {unknown[0]}, but tokens must be from 0 to {config.vocab_size - 1}.")
    if max_new_tokens < 1:
        raise InputError(f"max_new_tokens is {max_new_tokens}, but must be at least 1.")
    if not (temperature >= 0 and math.isfinite(temperature)):
        raise InputError(f"temperature is {temperature}, but must be finite and at least 0.")
    if temperature > 0 and key is None:
        raise InputError("A temperature above 0 needs a random key: pass key=jax.random.key(0), for example.")
    longest = max(map(len, rows))
    capacity = longest + max_new_tokens
    if capacity > config.max_positions:
        raise InputError(f"The longest prompt ({longest} tokens) and max_new_tokens={max_new_tokens} exceed "
                         f"model.max_positions={config.max_positions}. Shorten one of them.")  # fmt: skip
    tokens, segments = np.zeros((2, len(rows), longest), np.int32)
    for index, row in enumerate(rows):  # left padding, so that all rows continue at the same position
        tokens[index, longest - len(row) :] = row
        segments[index, longest - len(row) :] = 1
    key = jax.random.key(0) if key is None else key
    placement = _first_device(config, model.dtype.name) if placement is None else placement
    drawn = np.asarray(_decode(model, tokens, segments, key, jnp.float32(max(temperature, 1e-6)),
                               steps=max_new_tokens, greedy=temperature == 0, placement=placement))  # fmt: skip
    return [row[: row.index(stop_token)] if stop_token in row else row for row in drawn.tolist()]


def _first_device(config: ModelConfig, dtype: str) -> Placement:
    """Return the placement of a model on the first device, with kernels validated there."""
    model, mesh = abstract_model(config), make_mesh(devices=jax.devices()[:1])
    kernels = validate_kernels(device_kernels(config, dtype), config, dtype, training=False)
    return make_placement(ParallelConfig(), mesh, shapes(model), roles(model), dtype, kernels)


@functools.partial(jax.jit, static_argnames=("steps", "greedy", "placement"))
def _decode(model: Zaya, tokens_bs: jax.Array, segments_bs: jax.Array, key: jax.Array, temperature: jax.Array, *,
            steps: int, greedy: bool, placement: Placement) -> jax.Array:  # fmt: skip
    """Sample tokens one after another, int32 [b, steps]."""
    (b, s), ops = tokens_bs.shape, placement.ops
    out = model(tokens_bs, segments_bs, cache=init_cache(model.config, b, s + steps, model.dtype), ops=ops)

    def draw(hidden_bd: jax.Array, key: jax.Array) -> jax.Array:
        scores = head(model, hidden_bd)
        if greedy:
            return jnp.argmax(scores, -1).astype(jnp.int32)
        return jax.random.categorical(key, scores / temperature).astype(jnp.int32)

    def step(carry: tuple, key: jax.Array) -> tuple[tuple, jax.Array]:
        token_b, cache = carry
        out = model(token_b[:, None], jnp.ones((b, 1), jnp.int32), cache=cache, ops=ops)
        token_b = draw(out.hidden_bsd[:, 0], key)
        return (token_b, out.cache), token_b

    keys = jax.random.split(key, steps)
    first_b = draw(out.hidden_bsd[:, -1], keys[0])
    _, rest = jax.lax.scan(step, (first_b, out.cache), keys[1:])
    return jnp.concatenate([first_b[None], rest]).T
