"""Draw tokens from logits: temperature, top-k, top-p, min-p and repetition penalty, with a random stream per row."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from zaya_jax.config.checks import require

_COLDEST = 1e-6  # a lower temperature divides by this


class Sampling(NamedTuple):
    """The settings with which tokens are drawn; the defaults take the most likely one.

    The order is that of `transformers`: repetition penalty, temperature, top-k, top-p, min-p.
    """

    # divides the logits; 0 takes the most likely token, and the fields below that select tokens have no effect
    temperature: float = 0.0
    top_k: int = 0  # keep the `top_k` most likely tokens; 0 keeps all
    top_p: float = 1.0  # keep the most likely tokens whose probabilities reach `top_p` together; 1 keeps all
    min_p: float = 0.0  # keep tokens at least `min_p` times as likely as the most likely one; 0 keeps all
    # divides positive logits of tokens that occurred in prompt or text, and multiplies negative ones (arXiv
    # 1909.05858); 1 changes nothing
    repetition_penalty: float = 1.0

    def check(self, prefix: str = "") -> None:
        """Raise `InputError` if a value is out of range; `prefix` precedes the names in messages."""
        names = [f"{prefix}{name}" for name in self._fields]
        names = [name.replace("_", "-") for name in names] if prefix == "--" else names  # flags have hyphens
        rules = (
            (0 <= self.temperature < math.inf, "finite and at least 0"),
            (self.top_k >= 0, "at least 0 (0 keeps all tokens)"),
            (0 < self.top_p <= 1, "above 0 and at most 1"),
            (0 <= self.min_p <= 1, "from 0 to 1"),
            (0 < self.repetition_penalty < math.inf, "finite and above 0"),
        )
        for name, value, (holds, allowed) in zip(names, self, rules, strict=True):
            require(holds, name, value, allowed)

    @property
    def branches(self) -> "Branches":
        """The operations that `draw` needs."""
        greedy = self.temperature == 0
        return Branches(greedy, not greedy and (self.top_k > 0 or self.top_p < 1), self.repetition_penalty != 1)


class Branches(NamedTuple):
    """The static part of sampling; the values of `Sampling` are arguments, so that other values need no compilation."""

    greedy: bool  # take the most likely token
    sorts: bool  # keep the most likely tokens by number or by probability, which sorts the vocabulary
    penalizes: bool  # keep track of which tokens occurred


def draw(
    logits_bv: jax.Array, keys_b: jax.Array, sampling: Sampling, branches: Branches, occurred_bv: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Draw a token for each row of fp32 logits, with its random key; the values of `sampling` may be traced.

    `occurred_bv`, bool, says which tokens occurred in the row; None without a repetition penalty. Returns int32 [b]
    tokens, and their fp32 [b] log-probabilities under the model (of `logits_bv` as they are).
    """
    scores = logits_bv
    if occurred_bv is not None:
        penalty = sampling.repetition_penalty
        scores = jnp.where(occurred_bv, jnp.where(scores > 0, scores / penalty, scores * penalty), scores)
    if branches.greedy:
        token_b = jnp.argmax(scores, -1).astype(jnp.int32)
    else:
        kept = keep_likely(scores / jnp.maximum(sampling.temperature, _COLDEST), sampling, branches.sorts)
        token_b = jax.vmap(jax.random.categorical)(keys_b, kept).astype(jnp.int32)
    chosen_b = jnp.take_along_axis(logits_bv, token_b[:, None], -1)[:, 0]
    return token_b, chosen_b - jax.nn.logsumexp(logits_bv, -1)


def keep_likely(scores_bv: jax.Array, sampling: Sampling, sorts: bool) -> jax.Array:
    """Set the scores of tokens that top-k, top-p or min-p exclude to minus infinity."""
    highest = scores_bv.max(-1, keepdims=True)
    if sorts:
        v = scores_bv.shape[-1]
        ordered = -jnp.sort(-scores_bv, -1)
        count = jnp.where(jnp.asarray(sampling.top_k) > 0, jnp.minimum(sampling.top_k, v), v)
        ordered = jnp.where(jnp.arange(v) < count, ordered, -jnp.inf)
        probabilities = jax.nn.softmax(ordered, -1)
        before = jnp.cumsum(probabilities, -1) - probabilities
        within = jnp.isfinite(ordered) & ((before < sampling.top_p) | (jnp.asarray(sampling.top_p) >= 1))
        least = jnp.where(within, ordered, jnp.inf).min(-1, keepdims=True)
        scores_bv = jnp.where(scores_bv >= least, scores_bv, -jnp.inf)
    # In logits, `min_p` times as likely is log(min_p) lower.
    return jnp.where(scores_bv >= highest + jnp.log(sampling.min_p), scores_bv, -jnp.inf)
