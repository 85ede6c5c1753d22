"""A task that a small ZAYA1 learns in seconds on a CPU: half of the rows repeat a random word, the others count."""

import dataclasses
import functools
import os
import string
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from zaya_jax import Zaya, load_config, muon
from zaya_jax.config import BalanceConfig, ModelConfig
from zaya_jax.model.layers import MATRIX_ROLES
from zaya_jax.model.tree import balancing_biases, parameters, roles, with_values
from zaya_jax.model.zaya import head
from zaya_jax.optim.balance import load_error, make_balancer

ROOT = Path(__file__).parents[1]
ALPHABET = string.ascii_lowercase + string.digits + "|"
LENGTH = 32  # tokens of a row
HALF = LENGTH // 2  # a word and its end
ROWS = 16  # of a step
# XLA's highest level would compile for 30 s what then runs for 4 s. jax reads this when it first computes.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=1 --xla_llvm_disable_expensive_passes=true")


class Training(NamedTuple):
    """A trained model and its curves, with a leading axis if several runs were trained.

    Attributes:
      model: the model after the last step.
      copy_n: nats/token at each step, where rows repeat their word.
      count_n: the same where rows count, from their fifth token on.
      counts_nle: tokens of each expert at each step, skip last.
    """

    model: Zaya
    copy_n: jax.Array
    count_n: jax.Array
    counts_nle: jax.Array


def small_model(**changes: Any) -> ModelConfig:
    """Return an architecture with two layers of four experts, with `changes`."""
    sizes = {"vocab_size": len(ALPHABET), "hidden_size": 64, "num_layers": 2, "head_dim": 32, "num_experts": 4,
             "expert_size": 64, "router_size": 16} | changes  # fmt: skip
    overrides = [f"model.{key}={value}" for key, value in sizes.items()]
    return load_config(ROOT / "configs" / "tiny.yaml", overrides).model


def make_rows(key: jax.Array, count: int = ROWS) -> jax.Array:
    """Draw int32 rows of tokens [count, LENGTH]: even ones such as 'fox|fox|', odd ones such as '1357913579'."""
    key_word, key_start, key_step = jax.random.split(key, 3)
    word = jax.random.randint(key_word, (count, HALF), 0, 26).at[:, -1].set(ALPHABET.index("|"))
    start, step = (
        jax.random.randint(key, (count, 1), *ends) for key, ends in ((key_start, (0, 10)), (key_step, (1, 4)))
    )
    counted = 26 + (start + step * jnp.arange(LENGTH)) % 10
    return jnp.where(jnp.arange(count)[:, None] % 2 == 0, jnp.tile(word, 2), counted)


def as_text(tokens: jax.Array) -> str:
    """Return the characters of a row of tokens."""
    return "".join(ALPHABET[token] for token in tokens)


def losses(model: Zaya, tokens_bs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return nats [b, s - 1] of each next token, and tokens of each expert [l, e + 1]."""
    out = model(tokens_bs)
    logits = head(model, out.hidden_bsd)[:, :-1]
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, tokens_bs[:, 1:])
    return nats, out.stats.expert_counts_le


def train(
    config: ModelConfig, seed: Any = 0, rate: Any = 0.02, balance_rate: Any = 0.02, *, steps: int = 300,
    matrices: str = "muon",
) -> Training:  # fmt: skip
    """Train a model, or one for each element of `seed`, `rate` and `balance_rate`, which are broadcast.

    Args:
      config: the architecture.
      seed: of parameters and rows.
      rate: peak learning rate of the matrices; that of all other parameters is 0.012.
      balance_rate: learning rate of the balancing biases; 0 for no balancing.
      steps: number of steps.
      matrices: optimizer of the matrices, 'muon' or 'adamw'.
    """
    runs = [jnp.asarray(x) for x in np.broadcast_arrays(seed, rate, balance_rate)]
    run = functools.partial(_train, config, steps, matrices)
    every = (lambda *runs: jax.lax.map(lambda one: run(*one), runs)) if runs[0].ndim else run
    return jax.jit(every)(*runs)


def _train(config: ModelConfig, steps: int, matrices: str, seed: Any, rate: Any, balance_rate: Any) -> Training:
    key_model, key_rows = jax.random.split(jax.random.key(seed))
    model = Zaya(config, key_model)
    is_matrix = {name: role in MATRIX_ROLES for name, role in roles(model).items()}
    schedule = optax.schedules.warmup_cosine_decay_schedule(0.0, 1.0, 10, steps, 0.05)
    of_matrices = {"muon": muon, "adamw": functools.partial(optax.adamw, b2=0.95)}[matrices]
    transforms = {True: of_matrices(lambda n: rate * schedule(n)),
                  False: optax.adamw(lambda n: 0.012 * schedule(n), b2=0.95)}  # fmt: skip
    optimizer = optax.partition(transforms, is_matrix)
    balancer = make_balancer(dataclasses.replace(BalanceConfig(), learning_rate=balance_rate))

    def step(state: Any, key: jax.Array) -> tuple[Any, Any]:
        params, biases, optimizer_state, balancer_state = state

        def mean_loss(params: Any) -> Any:
            nats, counts = losses(with_values(model, params | biases), make_rows(key))
            return nats.mean(), (nats[::2, HALF:].mean(), nats[1::2, 4:].mean(), counts)

        gradient, curves = jax.grad(mean_loss, has_aux=True)(params)
        updates, optimizer_state = optimizer.update(gradient, optimizer_state, params)
        moves, balancer_state = balancer.update(dict.fromkeys(biases, load_error(curves[-1])), balancer_state)
        return (optax.apply_updates(params, updates), optax.apply_updates(biases, moves), optimizer_state,
                balancer_state), curves  # fmt: skip

    params, biases = parameters(model), balancing_biases(model)
    state = params, biases, optimizer.init(params), balancer.init(biases)
    state, curves = jax.lax.scan(step, state, jax.random.split(key_rows, steps))
    return Training(with_values(model, state[0] | state[1]), *curves)
