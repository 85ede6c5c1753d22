"""The held-out loss of a checkpoint, computed as its run computed it: same text, same batches, same dtypes."""

import dataclasses
import functools
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from zaya_jax.config import Config, ModelConfig, ParallelConfig, from_dict
from zaya_jax.config.stages import first_step, stage_at
from zaya_jax.data.loading.batches import HeldoutText, heldout_text
from zaya_jax.data.loading.sources import open_sources
from zaya_jax.errors import InputError
from zaya_jax.evaluate.evaluator import ModelSnapshot
from zaya_jax.evaluate.heldout import HeldoutEvaluator
from zaya_jax.job.multihost import primary_first
from zaya_jax.model.loss import chunked_loss
from zaya_jax.model.tree import Arrays, abstract_weights, is_balancing_bias, roles, shapes, with_values
from zaya_jax.model.zaya import abstract_model
from zaya_jax.ops.precision import accumulation_dtype
from zaya_jax.ops.registry import pins_anywhere
from zaya_jax.parallel.kernels import validated_kernels
from zaya_jax.parallel.mesh import make_mesh, replicated
from zaya_jax.parallel.placement import Placement, make_placement
from zaya_jax.run.folder import read_config
from zaya_jax.weights.sources import Weights


class TextLoss(NamedTuple):
    """The loss over a text."""

    nats: float  # cross-entropy of all tokens
    tokens: int  # number of tokens predicted
    text_bytes: int  # UTF-8 bytes that these tokens stand for
    lost_bytes: int = 0  # other bytes of the text, for which the tokenizer has no token


class RunHeldout:
    """The held-out text of a run."""

    def __init__(self, run: Path) -> None:
        """Open the data that the configuration in a run folder names; InputError if it is missing."""
        self._config = from_dict(read_config(run))
        prepared = primary_first(lambda: open_sources(self._config))
        self._prepared, self._measure = prepared, functools.cache(self._measure_texts)
        if not any(text.text_bytes for text in self._measure(len(self._config.phases) - 1).values()):
            raise InputError(f"The sources of {run} have no held-out text. Name files to score with --text.")
        self._evaluator = HeldoutEvaluator(self._config, prepared)
        self._program = functools.cache(functools.partial(_program, self._config, run))

    def texts(self, step: int) -> dict[str, HeldoutText]:
        """Measure the held-out text of each source as the phase reads it that trained the step before `step`."""
        return self._measure(self._phase(step))

    def _phase(self, step: int) -> int:
        return stage_at(self._config, max(step - 1, first_step(self._config))).phase

    def _measure_texts(self, phase: int) -> dict[str, HeldoutText]:
        limit = self._config.evaluation.batches
        texts = {name: heldout_text(self._config, self._prepared, name, limit, phase)
                 for name in self._prepared.sources}  # fmt: skip
        return {name: text for name, text in texts.items() if text is not None}

    def losses(self, weights: Weights, step: int) -> dict[str, TextLoss]:
        """Compute the loss of each source that has held-out text.

        Args:
          weights: a checkpoint of the run. Adapters are merged into their base first.
          step: of the checkpoint.

        Raises:
          InputError: the weights are damaged.
        """
        placement, loss_sums = self._program(weights.config)
        values = weights.load(_abstract(weights, placement))
        params, balance = ({name: x for name, x in values.items() if is_balancing_bias(name) == biases}
                           for biases in (False, True))  # fmt: skip
        self._evaluator.evaluate(ModelSnapshot(params, balance, {}, placement, loss_sums, self._phase(step)))
        texts = self.texts(step)
        return {name: TextLoss(loss.nats, loss.tokens, texts[name].text_bytes)
                for name, loss in self._evaluator.losses.items()}  # fmt: skip


def _program(run_config: Config, run: Path, config: ModelConfig) -> tuple[Placement, Any]:
    """Make the placement over all devices of the job, with the kernels of the run, and the evaluation step."""
    model, dtype = abstract_model(config), run_config.train.compute_dtype
    evaluated = dataclasses.replace(run_config, model=config, ops=pins_anywhere(run_config.ops))
    kernels = validated_kernels(evaluated, run, training=False, say=functools.partial(print, file=sys.stderr))
    placement = make_placement(ParallelConfig(), make_mesh(), shapes(model), roles(model), dtype, kernels)

    def loss(params: Arrays, balance: Arrays, batch: Mapping[str, Any]) -> dict[str, jax.Array]:
        out: Any = with_values(model, {**params, **balance})(
            batch["tokens"], batch["segment_ids"], batch["positions"], ops=placement.ops, dtype=dtype
        )
        weights_t = batch["loss_mask"].reshape(-1).astype(accumulation_dtype(dtype))
        losses: Any = chunked_loss(out.hidden_bsd.reshape(-1, config.hidden_size), params["embedding"],
                                   params.get("head_bias"), batch["targets"].reshape(-1), weights_t)  # fmt: skip
        return {"loss": losses[0], "tokens": weights_t.sum()}

    return placement, jax.jit(placement.sums(loss))


def _abstract(weights: Weights, placement: Placement) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the arrays of a model in the dtypes of training, sharded as stored."""

    def placed(name: str, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        if is_balancing_bias(name):
            exact = accumulation_dtype(placement.dtypes["embedding"])
            return jax.ShapeDtypeStruct(x.shape, exact, sharding=replicated(placement.mesh))
        stored = jax.sharding.NamedSharding(placement.mesh, placement.leaves[name].stored)
        return jax.ShapeDtypeStruct(x.shape, placement.dtypes[name], sharding=stored)

    return {name: placed(name, x) for name, x in abstract_weights(weights.config).items()}
