"""The training step and the evaluation step: pure functions of state and batch."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zaya_jax.config import Config
from zaya_jax.config.stages import phase_steps
from zaya_jax.model.lora import adapted
from zaya_jax.model.loss import chunked_loss
from zaya_jax.model.tree import Arrays, layer_position, with_values
from zaya_jax.ops.parts import part
from zaya_jax.ops.precision import accumulation_dtype
from zaya_jax.optim.balance import load_error
from zaya_jax.optim.schedule import learning_rate_factor
from zaya_jax.optim.skippable import skippable
from zaya_jax.parallel.gradient import EARLIER
from zaya_jax.train.spec import PhaseSpec
from zaya_jax.train.spikes import append_skipped, append_step, classify_step, reset_history
from zaya_jax.train.state import TrainState

# tokens, targets, segment_ids, positions: int32 [.., b, s]; loss_mask: bool [.., b, s]; with several sources also
# sources: int16 [.., b, s], index in `data.sources`.
Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]


def make_local_loss(program: PhaseSpec) -> Callable[[Arrays, Arrays, Batch], tuple[jax.Array, dict[str, jax.Array]]]:
    """Make the loss function of one device: (compute copy, balancing biases, batch) → (summed loss, sums).

    The compute copy is the result of `parallel.gradient.compute_copy`, with frozen parameters and adapters together.
    The loss is summed over tokens, in nats; `sums` holds it, for evaluations, too, and the counts that metrics need. A
    further term of the loss does not belong into `sums["loss"]`.
    """
    config, ops, lora = program.config, program.placement.ops, program.config.lora

    def local_loss(params: Arrays, balance: Arrays, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
        values = params if lora is None else adapted(params, lora.scale)
        model = with_values(program.model, {**values, **balance})
        # Lookup and head both take the fp32 embedding: their gradients are sums over all tokens, too long for bf16.
        inputs, dtype = (batch["tokens"], batch["segment_ids"], batch["positions"]), config.train.compute_dtype
        out = model(*inputs, ops=ops, remat=program.remat, dtype=dtype)
        weights = batch["loss_mask"].reshape(-1).astype(accumulation_dtype(config.train.compute_dtype))
        hidden_td, targets = out.hidden_bsd.reshape(-1, config.model.hidden_size), batch["targets"].reshape(-1)
        head = params["embedding"], params.get("head_bias")
        of_head = lora is not None, params.get(EARLIER + "embedding")
        losses: tuple[jax.Array, jax.Array] = chunked_loss(hidden_td, *head, targets, weights, *of_head)
        loss, loss_t = losses
        sums = {"loss": loss, "tokens": weights.sum(), "counts": out.stats.expert_counts_le}
        if "sources" in batch:
            # A scatter would not be deterministic on GPUs.
            is_source_nt = batch["sources"].reshape(-1) == jnp.arange(len(config.data.source_names))[:, None]
            sums["source_loss"] = jnp.where(is_source_nt, loss_t, 0.0).sum(1)
            sums["source_tokens"] = jnp.where(is_source_nt, weights, 0.0).sum(1)
        return loss, sums

    return local_loss


def make_train_step(program: PhaseSpec) -> Callable[..., tuple[TrainState, Metrics]]:
    """Make the training step (state, batch, base) → (state, metrics) of a phase.

    The batch's leaves are [micro-batches, sequences, context]. `base` holds the frozen parameters under adapters, by
    name and in the compute dtype; omit it without adapters. A skipped step (`spikes.classify_step`) changes only the
    counters.

    Metrics are fp32 scalars unless noted:
      `loss`: nats/token.
      `tokens`: number of tokens in the loss.
      `grad_norm`: before clipping; `grad_norm_by_role` the same for each role.
      `update_norm_by_role`: norm of the change of the parameters.
      `learning_rate`: base rate of the matrices.
      `skip`: why the step was skipped, index of `spikes.REASONS`; `skipped`: number of steps skipped in a row.
      `expert_counts`: int32 [l, e + 1], tokens of each expert, skip last.
      `load_entropy`: [l], 1 is uniform; `max_load`: [l], relative to the mean; `skip_rate`, `bias_range`: [l].
      `source_loss` (summed, nats), `source_tokens`: [n] in the order of `data.sources`, with several sources only.
    """
    config, placement = program.config, program.placement
    gradient = placement.gradient(make_local_loss(program), program.remat != "full", continued=("embedding",))
    optimizer = skippable(program.optimizer)
    options, spike, rate_at = config.optimizer, config.train.spike, learning_rate_factor(config)
    peak_rate = getattr(options, config.matrices).learning_rate
    firsts = np.fromiter((first for first, _ in phase_steps(config)), np.int32)

    def train_step(state: TrainState, batch: Batch, base: Arrays | None = None) -> tuple[TrainState, Metrics]:
        with part("accumulation"):  # what belongs to no part of the model
            sums, grads = gradient(state.params, state.balance, batch, base)
        tokens = jnp.maximum(sums["tokens"], 1.0)
        loss = sums["loss"] / tokens
        with part("optimizer"):
            grad_squares = _squares(grads)
        norm = jnp.sqrt(sum(grad_squares.values())) / tokens
        factor = jnp.minimum(1.0, options.clip_norm / jnp.maximum(norm, 1e-12)) / tokens
        recent = reset_history(state.recent, (state.step == firsts).any())
        skip = classify_step(spike, recent, loss, norm)
        rate = rate_at(state.step)
        # Scaling and skipping happen inside the optimizer's own pass: a separate pass would read all state again.
        with part("optimizer"):
            extra = {"factor": factor, "skip": skip != 0, "on_matrices": placement.on_matrices, "ops": placement.ops}
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params, **extra)
            params = jax.tree.map(lambda p, u: p + rate * u, state.params, updates)
            update_norms = _norm_by_role(_squares(updates), program)
        errors = _split_by_stack(load_error(sums["counts"]), state.balance, config)
        moves, balance_state = program.balancer.update(errors, state.balance_state)
        balance = jax.tree.map(jnp.add, state.balance, moves)

        new = (params, balance, balance_state, append_step(recent, loss, norm))
        old = (state.params, state.balance, state.balance_state, append_skipped(spike, recent, loss, norm))
        params, balance, balance_state, recent = jax.tree.map(lambda n, o: jnp.where(skip == 0, n, o), new, old)
        skipped = jnp.where(skip == 0, 0, state.skipped + 1)
        metrics = {
            "loss": loss,
            "grad_norm": norm,
            "learning_rate": rate * peak_rate,
            "tokens": sums["tokens"],
            "skipped": skipped,
            "skip": skip,
            "grad_norm_by_role": {role: x / tokens for role, x in _norm_by_role(grad_squares, program).items()},
            "update_norm_by_role": {role: jnp.where(skip == 0, rate * x, 0.0) for role, x in update_norms.items()},
            "expert_counts": sums["counts"],
            **{name: sums[name] for name in ("source_loss", "source_tokens") if name in sums},
            **_expert_metrics(sums["counts"], balance),
        }
        state = TrainState(params, balance, opt_state, balance_state, state.step + 1, skipped, recent, state.rng)
        return state, metrics

    return train_step


def make_evaluation_step(program: PhaseSpec) -> Callable[..., dict[str, jax.Array]]:
    """Make the evaluation step (params, balance, batch, frozen) → `loss` (summed, nats) and number of `tokens`.

    The batch's leaves are [sequences, context]; `frozen` is the `base` of `make_train_step`.
    """
    local_loss = make_local_loss(program)

    def loss_and_tokens(params: Arrays, balance: Arrays, batch: Batch) -> dict[str, jax.Array]:
        sums = local_loss(params, balance, batch)[1]
        return {"loss": sums["loss"], "tokens": sums["tokens"]}

    return program.placement.sums(loss_and_tokens)


def _squares(tree: Any) -> dict[str, jax.Array]:
    """Return the squared norm of each leaf of a flat dict, sorted by name."""
    return {name: jnp.square(tree[name]).sum() for name in sorted(tree)}


def _norm_by_role(squares: dict[str, jax.Array], program: PhaseSpec) -> dict[str, jax.Array]:
    """Return the norm over all leaves of each role, from squared norms by leaf."""
    totals: dict[str, Any] = {}
    for name, square in squares.items():
        role = program.roles[name]
        totals[role] = totals.get(role, 0.0) + square
    return {role: jnp.sqrt(total) for role, total in totals.items()}


def _split_by_stack(values_le: jax.Array, balance: Arrays, config: Config) -> Arrays:
    """Split rows of all layers into the stacks of balancing biases: layer g·p + i is row g of stack i."""
    grouped = values_le.reshape(config.model.num_groups, len(config.model.period), -1)
    return {name: grouped[:, layer_position(name)] for name in balance}


def _expert_metrics(counts_le: jax.Array, balance: Arrays) -> dict[str, Any]:
    counts = counts_le.astype(jnp.float32)
    real = counts[:, :-1]
    share = real / jnp.maximum(real.sum(-1, keepdims=True), 1.0)
    entropy = -jnp.sum(jnp.where(share > 0, share * jnp.log(jnp.maximum(share, 1e-30)), 0.0), -1)
    stacks = [balance[name] for name in sorted(balance, key=layer_position)]
    biases = jnp.stack(stacks, 1).reshape(real.shape[0], -1)[:, :-1]  # layer g·p + i is row g of stack i
    return {
        "load_entropy": entropy / jnp.log(max(real.shape[1], 2)),
        "max_load": share.max(-1) * real.shape[1],
        "skip_rate": counts[:, -1] / jnp.maximum(counts.sum(-1), 1.0),
        "bias_range": biases.max(-1) - biases.min(-1),
    }
