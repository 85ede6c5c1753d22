"""Low-rank adapters of attention and expert matrices: W + (alpha / rank)·A·B (LoRA, arXiv 2106.09685).

A matrix `blocks.0.attention.query` of [l, d, x] has the adapters `….lora_a` [l, d, rank] and `….lora_b` [l, rank, x];
each expert has its own pair. Adapters are merged one layer at a time, in fp32, and rounded once to the dtype of the
matrix, so that an export in that dtype is exactly the model that was trained.
"""

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from zaya_jax.model.layers import Role, Roles, Shapes, matrix
from zaya_jax.ops.precision import accumulation_dtype

Arrays = Mapping[str, jax.Array]
ADAPTED: tuple[Role, ...] = ("attention", "expert")
_A, _B = "lora_a", "lora_b"


@functools.partial(jax.tree_util.register_dataclass, data_fields=["base", "a", "b"], meta_fields=["scale"])
@dataclasses.dataclass(frozen=True)
class Adapted:
    """A frozen matrix with its adapters, which takes the place of the matrix in a model."""

    base: jax.Array  # [.., in, out], in the compute dtype
    a: jax.Array  # [.., in, rank]
    b: jax.Array  # [.., rank, out]
    scale: float  # factor of their product, alpha / rank


def adapter_names(name: str) -> tuple[str, str]:
    """Return the names of the adapters A and B of the matrix `name`."""
    return f"{name}.{_A}", f"{name}.{_B}"


def adapter_shapes(shapes: Shapes, roles: Roles, rank: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of each adapter by name, from the shapes and roles of the parameters."""
    adapters = {}
    for name, shape in shapes.items():
        if roles[name] in ADAPTED:
            a, b = adapter_names(name)
            adapters |= {a: (*shape[:-1], rank), b: (*shape[:-2], rank, shape[-1])}
    return adapters


def adapter_roles(roles: Roles) -> dict[str, Role]:
    """Return the role of each adapter by name, which is the role of its matrix."""
    return {adapter: role for name, role in roles.items() if role in ADAPTED for adapter in adapter_names(name)}


def draw_adapters(key: jax.Array, shapes: Shapes, dtype: jax.typing.DTypeLike) -> dict[str, jax.Array]:
    """Draw the initial adapters: A from N(0, 1 / in) and B zero, so that the sum is W."""
    keys = dict(zip(sorted(shapes), jax.random.split(key, len(shapes)), strict=True))
    drawn = {name: matrix(keys[name], shape) for name, shape in shapes.items() if name.endswith(_A)}
    return {name: drawn.get(name, jnp.zeros(shape)).astype(dtype) for name, shape in shapes.items()}


def adapted(params: Arrays, scale: float) -> dict[str, jax.Array | Adapted]:
    """Pair each parameter that has adapters, both by name, with them, as `Adapted`; `scale` is alpha / rank."""
    adapters = {adapter for name in params for adapter in adapter_names(name)}

    def attach(name: str, x: jax.Array) -> jax.Array | Adapted:
        a, b = adapter_names(name)
        return Adapted(x, params[a], params[b], scale) if a in params else x

    return {name: attach(name, x) for name, x in params.items() if name not in adapters}


def merge(matrix: Adapted) -> jax.Array:
    """Add the adapters to their matrix; returns [.., in, out] in the dtype of the base."""
    exact = accumulation_dtype(matrix.base.dtype)
    product = jnp.matmul(matrix.a.astype(exact), matrix.b.astype(exact), precision="highest")
    return (matrix.base.astype(exact) + matrix.scale * product).astype(matrix.base.dtype)


@functools.partial(jax.jit, static_argnames="scale")
def merged(params: Arrays, adapters: Arrays, scale: float) -> dict[str, jax.Array]:
    """Merge the adapters into the parameters of a model; returns them by name, in the dtype of `params`.

    The parameters must have the dtype in which the adapters were trained. At most one layer of one matrix is in fp32 at
    a time. `scale` is alpha / rank.
    """
    paired = adapted({**params, **adapters}, scale)
    return {name: jax.lax.map(merge, x) if isinstance(x, Adapted) else x for name, x in paired.items()}
