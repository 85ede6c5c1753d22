"""Overlap of the experts of a layer (ZAYA1-8B report, arXiv 2605.05365, appendix D; docs/reference.md §1.8).

Each expert reads from and writes to a few directions of the residual stream. The overlap of two experts is
s_ij = ‖Q_iᵀ Q_j‖² / r, where Q_i has the leading r singular directions of an expert's matrix as columns: those in which
[gate; up] reads, or those in which down writes. It is 1 for equal subspaces, 0 for orthogonal ones, and on average
r / d for random ones.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from zaya_jax.config.checks import require
from zaya_jax.model.zaya import Zaya
from zaya_jax.ops.precision import accumulation_dtype


class Overlap(NamedTuple):
    """Overlap of the experts of each layer."""

    overlap_lee: jax.Array  # fp32, symmetric, s_ij between 0 and 1; the diagonal is 1
    energy_le: jax.Array  # fp32, fraction of the squared singular values that belongs to the leading directions

    @property
    def mean_l(self) -> jax.Array:
        """Mean overlap of two different experts, by layer."""
        e = self.overlap_lee.shape[-1]
        return (self.overlap_lee.sum((1, 2)) - jnp.trace(self.overlap_lee, axis1=1, axis2=2)) / (e * (e - 1))


class Redundancy(NamedTuple):
    """Result of `expert_redundancy`."""

    input: Overlap  # overlap of the directions that experts read
    output: Overlap  # overlap of the directions that experts write
    floor: float  # expected overlap of random subspaces, rank / d


def expert_redundancy(model: Zaya, rank: int = 128) -> Redundancy:
    """Measure the overlap of the experts of each layer; one layer at a time is in fp32.

    The report uses rank 128 and gives, averaged over pairs and layers, 0.0904 (input) and 0.0990 (output) for ZAYA1-8B,
    whose floor is 0.0625. `rank` is the number of leading singular directions of a matrix. `InputError` if it exceeds
    the rank of an expert's matrices, or there is only one expert.
    """
    config = model.config
    most = min(config.hidden_size, config.expert_size)
    require(1 <= rank <= most, "rank", rank, f"at least 1 and at most {most}, the rank of an expert's matrices")
    require(config.num_experts > 1, "model.num_experts", config.num_experts, "at least 2, to compare experts")
    # A layer of group g and position p has index g·P + p.
    experts = [block.mixture.experts for block in model.blocks]
    stacks = [_redundancy(stack.gate_up[...], stack.down[...], rank) for stack in experts]
    read, write = jax.tree.map(lambda *x: jnp.stack(x, 1).reshape(-1, *x[0].shape[1:]), *stacks)
    return Redundancy(read, write, rank / config.hidden_size)


@functools.partial(jax.jit, static_argnums=2)
def _redundancy(gate_up_ledf: jax.Array, down_lefd: jax.Array, rank: int) -> tuple[Overlap, Overlap]:
    """Measure the layers of a stack; gate and up are side by side along the last axis."""

    def layer(matrices: tuple[jax.Array, jax.Array]) -> tuple[Overlap, Overlap]:
        gate_up_edf, down_efd = matrices
        return _overlap(gate_up_edf, rank), _overlap(down_efd.swapaxes(1, 2), rank)

    return jax.lax.map(layer, (gate_up_ledf, down_lefd))


def _overlap(matrix_edx: jax.Array, rank: int) -> Overlap:
    exact = accumulation_dtype(matrix_edx.dtype)

    def leading(matrix_dx: jax.Array) -> tuple[jax.Array, jax.Array]:
        matrix_dx = matrix_dx.astype(exact)
        values, vectors_dd = jnp.linalg.eigh(jnp.matmul(matrix_dx, matrix_dx.T, precision="highest"))
        return vectors_dd[:, -rank:], values[-rank:].sum() / values.sum()

    q_edr, energy_e = jax.lax.map(leading, matrix_edx)
    e, d, _ = q_edr.shape
    flat = q_edr.transpose(0, 2, 1).reshape(e * rank, d)
    products = jnp.matmul(flat, flat.T, precision="highest").reshape(e, rank, e, rank)
    return Overlap(jnp.square(products).sum((1, 3)) / rank, energy_e)
