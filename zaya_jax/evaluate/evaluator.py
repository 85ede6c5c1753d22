"""What an evaluator is: something that scores the model now and then while it trains.

A new one is a file beside this one, and a place in the list of `train.loop.run_training`.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import numpy as np

from zaya_jax.model.tree import Arrays
from zaya_jax.parallel.mesh import batch_shards
from zaya_jax.parallel.placement import Placement


@dataclasses.dataclass(frozen=True)
class ModelSnapshot:
    """The model after a step, on the devices.

    Attributes:
      params: master weights by name, of all parameters or of adapters alone.
      balance: balancing biases by name.
      base: the frozen parameters under adapters; {} without adapters.
      placement: how all of these lie on the devices.
      loss_sums: the compiled evaluation step, see `loss`.
    """

    params: Arrays
    balance: Arrays
    base: Arrays
    placement: Placement
    loss_sums: Callable[..., dict[str, jax.Array]]

    def loss(self, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        """Sums over a batch of arrays [b, s], see `data.rows.Packing.row`; does not wait for the devices.

        Returns:
          `loss`, cross-entropy in nats, and `tokens`, the number of tokens predicted.
        """
        missing = -len(batch["tokens"]) % batch_shards(self.placement.mesh)  # rows of padding, to make equal parts
        full = {name: np.pad(array, ((0, missing), (0, 0))) for name, array in batch.items()}
        return self.loss_sums(self.params, self.balance, self.placement.place(full), frozen=self.base)


class Evaluator(Protocol):
    """Scores a model.

    Attributes:
      name: key of its main score in `metrics.jsonl`.
      label: of that score on the console.
      ranks_checkpoints: whether that score, the lower the better, is the one checkpoints are kept by
        (`checkpoint.keep_best`); of one evaluator of a run.
    """

    name: str
    label: str
    ranks_checkpoints: bool

    def evaluate(self, model: ModelSnapshot) -> Mapping[str, Any]:
        """Scores for the row of the step in `metrics.jsonl`: a number as `name`, and whatever else JSON can hold.

        All processes of the job call it, and get the same scores.
        """
        ...
