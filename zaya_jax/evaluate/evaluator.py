"""The interface of evaluators, which score the model during training.

To add one, write a file next to this one, and add it to the list in `train.fit.run_training`.
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
    """The model after a step, on the devices."""

    params: Arrays  # master weights by name, of all parameters or of the adapters only
    balance: Arrays  # balancing biases by name
    base: Arrays  # the frozen parameters under adapters; {} without adapters
    placement: Placement  # mesh and shardings of all of these
    loss_sums: Callable[..., dict[str, jax.Array]]  # the compiled evaluation step, see `loss`
    # index of the phase that trained the model last, in which held-out text has its rows; None for the last
    phase: int | None = None

    def loss(self, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        """Sum the `loss` in nats, and the `tokens` predicted, of a batch, without waiting for the devices.

        It has arrays [b, s] by name, see `data.loading.packed_rows.Windows.row`.
        """
        missing = -len(batch["tokens"]) % batch_shards(self.placement.mesh)  # padding rows, for equal shards
        full = {name: np.pad(array, ((0, missing), (0, 0))) for name, array in batch.items()}
        return self.loss_sums(self.params, self.balance, self.placement.place(full), frozen=self.base)


class Evaluator(Protocol):
    """Scores a model during training."""

    name: str  # key of its main score in `metrics.jsonl`
    label: str  # label of that score on the console
    # whether `checkpoint.keep_best` uses that score (lower is better). True for at most one evaluator of a run.
    ranks_checkpoints: bool

    def evaluate(self, model: ModelSnapshot) -> Mapping[str, Any]:
        """Score the model. All processes of the job call it, and must get the same scores.

        Returns what to add to the step's row in `metrics.jsonl`: a number under `name`, and any other values for JSON.
        """
        ...
