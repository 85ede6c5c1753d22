"""Muon as an Optax transform (docs/reference.md §3.1)."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from zaya_jax.config import MuonConfig
from zaya_jax.ops import LOCAL, Ops
from zaya_jax.ops.momentum import Local, OfMatrices, OnMatrices, Pair, Scalar, momentum_numbers, step_momentum
from zaya_jax.ops.precision import accumulation_dtype
from zaya_jax.optim.skippable import SkippableTransform

# Bytes of the matrices that are orthogonalized at a time. Newton–Schulz needs several times as much for its
# intermediates, and 32 matrices of 2,048 × 4,096 already keep a GPU busy.
CHUNK = 2**29


class MeanState(NamedTuple):
    """State of `momentum_form: ema`: fp32 mean of the gradients, and the int32 step count of its bias correction."""

    steps: jax.Array
    mean: Any


def muon(
    learning_rate: optax.ScalarOrSchedule, momentum: jax.Array | float = 0.95, weight_decay: jax.Array | float = 0.1, *,
    config: MuonConfig | None = None,
) -> optax.GradientTransformationExtraArgs:  # fmt: skip
    """Muon with decoupled weight decay, for any Optax training loop.

    It composes with `optax.chain`, `multi_transform`, `masked`, `MultiSteps` and `inject_hyperparams`, which can change
    the first three arguments during training. It accepts matrices only, pytrees of arrays [..., in, out] whose leading
    axes are batches: use another transform for all other parameters, with `optax.partition`. Its `init` raises
    ValueError for a leaf with fewer than two axes.

    The momentum is at least 0 and below 1; the weight decay is decoupled, and multiplied by the learning rate, a number
    or a schedule of the step. Only the other settings of `config` are used.
    """
    init, update = scale_by_muon(dataclasses.replace(config or MuonConfig(), momentum=momentum))
    local: Any = functools.partial(update, ops=LOCAL)  # pyright: ignore[reportCallIssue]
    direction = optax.GradientTransformationExtraArgs(init, local)
    return optax.chain(direction, optax.add_decayed_weights(weight_decay), optax.scale_by_learning_rate(learning_rate))


def _on_one_device(_name: str, leaves: Pair, numbers: jax.Array, local: Local, function: OfMatrices) -> Pair:
    kept, matrices = local(numbers, *leaves)
    return kept, function(matrices)


def scale_by_muon(config: MuonConfig, split: Mapping[str, int] | None = None) -> SkippableTransform:
    """Make Muon's direction: momentum, orthogonalized and scaled by the matrix's shape.

    Learning rate and weight decay of the settings are ignored. `split` is the number of matrices side by side along the
    last axis of a leaf, by its name; each is orthogonalized and scaled separately. A leaf without an entry is one
    matrix.

    The transform is of flat dicts of leaves [..., in, out] by name; leading axes (layers, experts) are batches of
    matrices. Its updates are directions, to be multiplied by minus the learning rate. Its state is the momentum, in the
    shape of the parameters and at least fp32, and the step count of the form `ema`. `update` also takes `ops`, the
    implementations of the operations, and `on_matrices`, which handles matrices that are sharded over devices, see
    `parallel.muon.on_whole_matrices`.
    """
    parts = split or {}

    def init(params: optax.Params) -> optax.OptState:
        for path, leaf in jax.tree_util.tree_leaves_with_path(params):
            if jnp.ndim(leaf) < 2:
                name = jax.tree_util.keystr(path, simple=True, separator=".")
                problem = f"{name} has shape {jnp.shape(leaf)}"
                raise ValueError(f"Muon updates matrices only, but {problem}. Use optax.adamw, with optax.partition.")
        momentum = jax.tree.map(lambda x: jnp.zeros_like(x, accumulation_dtype(x.dtype)), params)
        if config.momentum_form == "sum":
            return optax.TraceState(momentum), optax.EmptyState()
        return MeanState(jnp.zeros((), jnp.int32), momentum), optax.EmptyState()

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None, *,
        ops: Ops, factor: Scalar = 1.0, skip: Scalar = False, on_matrices: OnMatrices = _on_one_device, **_: Any,
    ) -> tuple[optax.Updates, optax.OptState]:  # fmt: skip
        del params
        (old, empty), summed = state, config.momentum_form == "sum"
        steps, momenta = (0, old.trace) if summed else (old.steps + 1, old.mean)
        coefficients = momentum_coefficients(config, steps)

        def update_leaf(path: tuple[Any, ...], gradient: jax.Array, momentum: jax.Array) -> Pair:
            name, numbers = jax.tree_util.keystr(path, simple=True), (coefficients, factor, skip, momentum.dtype)
            exchange, packed = functools.partial(on_matrices, name), momentum_numbers(*numbers)
            return _step(config, parts.get(name, 1), ops, exchange, (gradient, momentum), packed)

        leaves, tree = jax.tree_util.tree_flatten_with_path(updates)
        pairs = [update_leaf(*leaf, m) for leaf, m in zip(leaves, jax.tree.leaves(momenta), strict=True)]
        momenta, directions = (tree.unflatten([pair[index] for pair in pairs]) for index in range(2))
        if summed:
            return directions, (optax.TraceState(momenta), empty)
        return directions, (MeanState(jnp.where(skip, old.steps, steps), momenta), empty)

    # `ops` has no default: without them, a training step would silently be slower.
    return SkippableTransform(init, update)  # pyright: ignore[reportArgumentType]


def momentum_coefficients(config: MuonConfig, steps: Scalar) -> tuple[Scalar, Scalar, Scalar, Scalar]:
    """Return a, b, c and d of the momentum m ← am + bg and the direction cm + dg, for the gradient g.

    `sum` is m ← μm + g. `ema` is the mean of `optax.contrib.muon`: m ← μm + (1 − μ)g, divided by 1 − μⁿ at step n,
    which is at least 1; with Nesterov the direction is μm / (1 − μⁿ⁺¹) + (1 − μ)g / (1 − μⁿ).
    """
    decay = config.momentum
    if config.momentum_form == "sum":
        return (decay, 1.0, decay, 1.0) if config.nesterov else (decay, 1.0, 1.0, 0.0)
    correction, next_correction = 1 - decay**steps, 1 - decay ** (steps + 1)
    if config.nesterov:
        return decay, 1 - decay, decay / next_correction, (1 - decay) / correction
    return decay, 1 - decay, 1 / correction, 0.0


def _step(
    config: MuonConfig, parts: int, ops: Ops, on_matrices: Callable[..., Pair], leaf: Pair, numbers: jax.Array
) -> Pair:
    """Return the new momentum of a leaf, a gradient and the old momentum, and its direction."""
    exact = leaf[1].dtype
    iterates = jnp.dtype(config.newton_schulz_dtype) if config.newton_schulz_dtype == "bfloat16" else exact
    between = iterates if exact == jnp.float32 else exact  # fp64 runs stay in fp64

    def local(numbers: jax.Array, gradient: jax.Array, momentum: jax.Array) -> Pair:
        return step_momentum(gradient, momentum, numbers, between)

    def chunk(m_xpq: jax.Array) -> jax.Array:
        options = {"steps": config.newton_schulz_steps, "dtype": iterates, "coefficients": config.coefficients}
        orthogonal = ops.orthogonalize(_split_parts(m_xpq, parts), **options)
        return _join_parts(orthogonal.astype(between), parts)

    new, orthogonal = on_matrices(leaf, numbers, local, functools.partial(_in_chunks, chunk))
    rows, columns = leaf[1].shape[-2:]
    return new, _scale(rows, columns // parts, config) * orthogonal.astype(exact)


def chunk_size(count: int, size: int) -> int:
    """Return how many of `count` matrices of `size` bytes are orthogonalized at a time, a divisor of `count`."""
    return max(n for n in range(1, min(count, max(CHUNK // size, 1)) + 1) if count % n == 0)


def _in_chunks(function: OfMatrices, m_xpq: jax.Array) -> jax.Array:
    """Apply `function` to `chunk_size` matrices at a time, in place."""
    *stack, p, q = m_xpq.shape
    count = math.prod(stack)
    chunk = chunk_size(count, p * q * m_xpq.dtype.itemsize)
    if chunk == count:
        return function(m_xpq)

    def apply_chunk(index: jax.Array, m: jax.Array) -> jax.Array:
        part = jax.lax.dynamic_slice_in_dim(m, index * chunk, chunk)
        return jax.lax.dynamic_update_slice_in_dim(m, function(part), index * chunk, 0)

    return jax.lax.fori_loop(0, count // chunk, apply_chunk, m_xpq.reshape(count, p, q)).reshape(m_xpq.shape)


def _split_parts(m_xpq: jax.Array, parts: int) -> jax.Array:
    """Reshape [.., p, q] to [.., parts, p, q / parts]; with one part, return it unchanged and copy nothing."""
    *stack, p, q = m_xpq.shape
    return m_xpq if parts == 1 else jnp.moveaxis(m_xpq.reshape(*stack, p, parts, q // parts), -2, -3)


def _join_parts(m_xopq: jax.Array, parts: int) -> jax.Array:
    """Undo `_split_parts`."""
    if parts == 1:
        return m_xopq
    *stack, _, p, q = m_xopq.shape
    return jnp.moveaxis(m_xopq, -3, -2).reshape(*stack, p, parts * q)


def _scale(rows: int, columns: int, config: MuonConfig) -> float:
    """Return the scale of an orthogonal matrix with `rows` inputs and `columns` outputs (torch: transposed)."""
    match config.scaling:
        case "match_rms_adamw":  # RMS 0.2, as AdamW's updates usually have (arXiv 2502.16982)
            return 0.2 * max(rows, columns) ** 0.5
        case "original":  # Jordan's Muon
            return max(1, columns / rows) ** 0.5
        case "unit_rms":  # an input of RMS 1 gives an output of RMS 1 (arXiv 2310.17813)
            return (columns / rows) ** 0.5
