"""A layer's parts, gathered where the layer begins."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from tests.helpers import assert_close, random_model
from tests.train_helpers import CONFIG, differing, make_program, on_devices
from zaya_jax.config import ParallelConfig
from zaya_jax.model.lora import Adapted, adapter_names, merge
from zaya_jax.model.tree import balancing_biases, parameters, with_values
from zaya_jax.parallel.layers import _gather, gather_layer
from zaya_jax.parallel.mesh import make_mesh
from zaya_jax.parallel.rules import place_leaves


def gathered():
    """On four devices: the matrix that each sees, and the gradient of a sum to which each adds its own factor."""
    mesh = make_mesh(ParallelConfig(fsdp=4), jax.devices()[:4])
    matrix = np.arange(1, 41, dtype=np.float32).reshape(5, 8)

    def region(part):
        def loss(part):
            full = _gather(part, 1, jnp.bfloat16)
            return (full.astype(jnp.float32) * (1.0 + jax.lax.axis_index("fsdp"))).sum(), full

        gradient, full = jax.grad(loss, has_aux=True)(part)
        return full[None], gradient

    split = PartitionSpec(None, "fsdp")
    out = jax.jit(jax.shard_map(region, mesh=mesh, in_specs=split, out_specs=(PartitionSpec("fsdp"), split),
                                check_vma=False))(matrix)  # fmt: skip
    return [np.asarray(x) for x in out]


def test_every_device_sees_the_whole_in_the_compute_dtype_and_keeps_its_part_of_the_exact_sum():
    full, gradient = on_devices(8, "tests.parallel.test_layers:gathered")
    matrix = np.arange(1, 41).reshape(5, 8)
    chex.assert_type([full, gradient], [jnp.bfloat16, jnp.float32])
    np.testing.assert_array_equal(full.astype(np.float32), [matrix] * 4)
    np.testing.assert_array_equal(gradient, np.full((5, 8), 1.0 + 2 + 3 + 4))


def test_what_is_not_split_is_left():
    placement, model = make_program(CONFIG).placement, random_model(CONFIG.model)
    layer = gather_layer(placement.leaves, placement.dtypes)(model)
    assert not differing(parameters(layer), parameters(model))


def test_a_matrix_and_its_adapters_become_their_sum():
    rng, name = np.random.default_rng(0), "blocks.0.attention.query"
    placement, model = make_program(CONFIG).placement, random_model(CONFIG.model)
    params = parameters(model)
    shape = params[name].shape
    a, b = (jnp.asarray(rng.normal(size=size), jnp.float32) for size in ((*shape[:-1], 2), (2, 2, shape[-1])))
    adapted = Adapted(params[name], a, b, 0.5)
    joined = with_values(model, {**params, **balancing_biases(model), name: adapted})
    gathered = parameters(gather_layer(placement.leaves, placement.dtypes)(joined))
    np.testing.assert_array_equal(gathered[name], merge(adapted))
    assert differing(gathered, params) == [f"['{name}']"]


def gathered_sum():
    """On two devices: the sum of a matrix and adapters that lie in parts, and the gradients of the adapters."""
    names = ("blocks.0.w", *adapter_names("blocks.0.w"))
    mesh = make_mesh(ParallelConfig(fsdp=2), jax.devices()[:2])
    values = dict(zip(names, whole_and_adapters(), strict=True))
    placed = place_leaves({name: x.shape for name, x in values.items()}, dict.fromkeys(names, "attention"), mesh)
    stored = {name: place.stored for name, place in placed.items()}

    def region(values):
        def loss(adapters):
            layer = {"w": nnx.Param(Adapted(values[names[0]][0], *(x[0] for x in adapters), 0.5))}
            full = gather_layer(placed, dict.fromkeys(names, jnp.float32))(layer)["w"][...]
            return (full**2).sum() / 2, full

        gradients, full = jax.grad(loss, has_aux=True)([values[name] for name in names[1:]])
        return full, gradients

    out = jax.jit(jax.shard_map(region, mesh=mesh, in_specs=(stored,),
                                out_specs=(PartitionSpec(), [stored[name] for name in names[1:]]),
                                check_vma=False))(values)  # fmt: skip
    return [[placed[name].axis for name in names], *jax.tree.map(np.asarray, jax.tree.leaves(out))]


def whole_and_adapters():
    rng = np.random.default_rng(0)
    return [np.float32(rng.normal(size=(1, *size))) for size in ((6, 4), (6, 3), (3, 4))]


def test_parts_are_gathered_before_they_are_added_up():
    """Each of the two devices has the whole loss, so that their gradients add up to twice that of one."""
    axes, full, a_gradient, b_gradient = on_devices(8, "tests.parallel.test_layers:gathered_sum")
    assert axes == [-2, -2, -1]
    w, a, b = (x[0] for x in whole_and_adapters())
    expected = w + 0.5 * a @ b
    assert_close(full, expected, 1e-6)
    assert_close(a_gradient[0], 2 * 0.5 * expected @ b.T, 1e-6)
    assert_close(b_gradient[0], 2 * 0.5 * a.T @ expected, 1e-6)
