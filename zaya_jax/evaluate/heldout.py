"""The loss on text the model was not trained on."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from zaya_jax.parallel.layout import Layout
from zaya_jax.parallel.mesh import batch_shards
from zaya_jax.train.memory_errors import out_of_memory
from zaya_jax.train.state import TrainState

# Batches that devices are given before the first of them is waited for. On CPUs of several processes, with as many as
# they can hold (32), each may wait for a collective of the other's that has not begun.
_AHEAD = 2


class HeldoutLoss(NamedTuple):
    """Sums over held-out tokens: `nats` of cross-entropy and the number of `tokens` predicted."""

    nats: float
    tokens: int

    @property
    def nats_per_token(self) -> float:
        """Mean cross-entropy."""
        return self.nats / max(self.tokens, 1)

    def bits_per_byte(self, text_bytes: int) -> float:
        """Cross-entropy spread over the `text_bytes` the tokens stand for."""
        return self.nats / math.log(2) / max(text_bytes, 1)


def together(losses: Mapping[str, HeldoutLoss]) -> HeldoutLoss:
    """The loss over the held-out text of all sources."""
    return HeldoutLoss(sum(loss.nats for loss in losses.values()), sum(loss.tokens for loss in losses.values()))


def evaluate_each(
    step: Callable[..., dict[str, jax.Array]],
    state: TrainState,
    batches: Mapping[str, Iterable[dict[str, np.ndarray]]],
    layout: Layout,
) -> dict[str, HeldoutLoss]:
    """`evaluate` for each source, those without a held-out token left out."""
    losses = {}
    jax.block_until_ready(state)  # what fails in a step is not taken for a failure of the evaluation
    for name, some in batches.items():
        with out_of_memory("The evaluation", "Lower evaluation.batch"):
            found = evaluate(step, state, some, layout)
        if found.tokens:
            losses[name] = found
    return losses


def evaluate(
    step: Callable[..., dict[str, jax.Array]],
    state: TrainState,
    batches: Iterable[dict[str, np.ndarray]],
    layout: Layout,
) -> HeldoutLoss:
    """Sum the compiled evaluation `step` over `batches`."""
    total = HeldoutLoss(0.0, 0)
    parts = batch_shards(layout.mesh)
    running: deque[Any] = deque()
    for batch in batches:
        running.append(step(state.params, state.balance, layout.place(_filled_up(batch, parts))))
        if len(running) > _AHEAD:
            total = _plus(total, running.popleft())
    for sums in running:
        total = _plus(total, sums)
    return total


def _plus(total: HeldoutLoss, sums: Any) -> HeldoutLoss:
    found = jax.device_get(sums)
    return HeldoutLoss(total.nats + found["loss"].item(), total.tokens + round(found["tokens"].item()))


def _filled_up(batch: dict[str, np.ndarray], parts: int) -> dict[str, np.ndarray]:
    """The batch with rows of padding, so that its rows make `parts` equal parts."""
    missing = -len(batch["tokens"]) % parts
    return {name: np.pad(array, ((0, missing), (0, 0))) for name, array in batch.items()}
