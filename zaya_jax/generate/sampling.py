"""Draw tokens from logits: temperature, top-k, top-p, min-p and repetition penalty, with a random stream per row."""

import functools
import math
from typing import Any, NamedTuple

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


def draw(
    logits_bv: jax.Array, keys_b: jax.Array, sampling: Sampling, occurred_bv: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Draw a token for each row of fp32 logits, with its random key and its `sampling`, whose values are arrays [b].

    `occurred_bv`, bool, says which tokens occurred in the row. Returns int32 [b] tokens, and their fp32 [b]
    log-probabilities under the model (of `logits_bv` as they are). Both depend on their own row only. What no row needs
    is not computed: sorting the vocabulary, or random numbers.
    """
    column: Any = jax.tree.map(lambda value_b: jnp.reshape(value_b, (-1, 1)), sampling)
    temperature, top_k, top_p, _, penalty = column

    def likeliest(scores: jax.Array) -> jax.Array:
        # The first index of the maximum. XLA:CPU compiles `argmax` to a scalar loop, which takes eight times as long.
        last, index = scores.shape[-1] - 1, jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)
        return jnp.where(scores == scores.max(-1, keepdims=True), index, last).min(-1)

    def drawn(sorts: bool, logits_bv: jax.Array) -> jax.Array:
        penalized = jnp.where(logits_bv > 0, logits_bv / penalty, logits_bv * penalty)
        scores = jnp.where(occurred_bv, penalized, logits_bv)
        kept = keep_likely(scores / jnp.maximum(temperature, _COLDEST), column, sorts)
        token_b = jax.vmap(jax.random.categorical)(keys_b, kept).astype(jnp.int32)
        return jnp.where(temperature[:, 0] == 0, likeliest(scores), token_b)

    greedy = temperature == 0
    sorts, plain = (~greedy & ((top_k > 0) | (top_p < 1))).any(), (greedy & (penalty == 1)).all()
    ways = [likeliest, functools.partial(drawn, False), functools.partial(drawn, True)]
    token_b = jax.lax.switch(jnp.where(plain, 0, jnp.where(sorts, 2, 1)), ways, logits_bv)
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
