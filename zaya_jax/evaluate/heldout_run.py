"""The held-out loss of a checkpoint, computed as its run computed it: same text, same batches, same dtypes."""

import dataclasses
import functools
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from zaya_jax.config import Config, ModelConfig, ParallelConfig, from_dict
from zaya_jax.config.stages import first_step, stage_at
from zaya_jax.data.loading.batches import HeldoutText
from zaya_jax.data.loading.sources import open_sources
from zaya_jax.errors import InputError
from zaya_jax.evaluate.evaluator import ModelSnapshot
from zaya_jax.evaluate.heldout import HeldoutEvaluator, HeldoutLoss
from zaya_jax.job.multihost import primary_first
from zaya_jax.model.loss import chunked_loss
from zaya_jax.model.tree import Arrays, abstract_weights, is_balancing_bias, roles, shapes, with_values
from zaya_jax.model.zaya import abstract_model
from zaya_jax.ops.precision import accumulation_dtype
from zaya_jax.ops.registry import pins_on
from zaya_jax.parallel.kernels import validated_kernels
from zaya_jax.parallel.mesh import make_mesh, replicated
from zaya_jax.parallel.placement import Placement, make_placement
from zaya_jax.run.folder import read_config
from zaya_jax.weights.sources import Weights


class RunHeldout:
    """The held-out text of a run."""

    def __init__(self, run: Path) -> None:
        """Open the data that the configuration in a run folder names; InputError if it is missing."""
        self._config = from_dict(read_config(run))
        self._evaluator = HeldoutEvaluator(self._config, primary_first(lambda: open_sources(self._config)))
        if not any(text.text_bytes for text in self._evaluator.texts[-1].values()):
            raise InputError(f"The sources of {run} have no held-out text. Name files to score with --text.")
        self._program = functools.cache(functools.partial(_program, self._config, run))

    def texts(self, step: int) -> dict[str, HeldoutText]:
        """Return the held-out text of each source as the phase reads it that trained the step before `step`."""
        return self._evaluator.texts[self._phase(step)]

    def _phase(self, step: int) -> int:
        return stage_at(self._config, max(step - 1, first_step(self._config))).phase

    def losses(self, weights: Weights, step: int) -> dict[str, HeldoutLoss]:
        """Compute the loss of each source with held-out text; InputError if a checkpoint's weights are damaged.

        Adapters are merged into their base first.
        """
        placement, loss_sums = self._program(weights.config)
        values = weights.load(_abstract(weights, placement))
        balance = {name: values.pop(name) for name in list(values) if is_balancing_bias(name)}
        self._evaluator.evaluate(ModelSnapshot(values, balance, {}, placement, loss_sums, self._phase(step)))
        return self._evaluator.losses


def _program(run_config: Config, run: Path, config: ModelConfig) -> tuple[Placement, Any]:
    """Make the placement over all devices of the job, with the kernels of the run, and the evaluation step."""
    model, dtype = abstract_model(config), run_config.train.compute_dtype
    evaluated = dataclasses.replace(run_config, model=config, ops=pins_on("cpu", run_config.ops))
    kernels = validated_kernels(evaluated, run, training=False, say=functools.partial(print, file=sys.stderr))
    placement = make_placement(ParallelConfig(), make_mesh(), shapes(model), roles(model), dtype, kernels)

    def loss(params: Arrays, balance: Arrays, batch: Mapping[str, Any]) -> dict[str, jax.Array]:
        arrays = (batch[name] for name in ("tokens", "segment_ids", "positions"))
        out: Any = with_values(model, {**params, **balance})(*arrays, ops=placement.ops, dtype=dtype)
        weights_t = batch["loss_mask"].reshape(-1).astype(accumulation_dtype(dtype))
        hidden_td, targets_t = out.hidden_bsd.reshape(-1, config.hidden_size), batch["targets"].reshape(-1)
        losses: Any = chunked_loss(hidden_td, params["embedding"], params.get("head_bias"), targets_t, weights_t)
        return {"loss": losses[0], "tokens": weights_t.sum()}

    return placement, jax.jit(placement.sums(loss))


def _abstract(weights: Weights, placement: Placement) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the arrays of a model in the dtypes of training, sharded as stored."""
    arrays, exact = {}, accumulation_dtype(placement.dtypes["embedding"])
    for name, x in abstract_weights(weights.config).items():
        dtype, sharding = exact, replicated(placement.mesh)
        if not is_balancing_bias(name):
            dtype = placement.dtypes[name]
            sharding = jax.sharding.NamedSharding(placement.mesh, placement.leaves[name].stored)
        arrays[name] = jax.ShapeDtypeStruct(x.shape, dtype, sharding=sharding)
    return arrays
