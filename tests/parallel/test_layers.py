"""A layer's parts, gathered where the layer begins."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from tests.train_helpers import CONFIG, differing, on_devices
from zaya_jax.config import ParallelConfig
from zaya_jax.model.tree import parameters
from zaya_jax.model.zaya import Zaya
from zaya_jax.parallel.layers import _gather, gather_layer
from zaya_jax.parallel.mesh import make_mesh
from zaya_jax.train.state import layout_of, make_blueprint


def gathered():
    """On four devices: the matrix that each sees, and the gradient of a sum to which each adds its own factor."""
    mesh = make_mesh(ParallelConfig(fsdp=4))
    matrix = np.arange(1, 41, dtype=np.float32).reshape(5, 8)

    def region(part):
        def loss(part):
            whole = _gather(part, 1, jnp.bfloat16)
            return (whole.astype(jnp.float32) * (1.0 + jax.lax.axis_index("fsdp"))).sum(), whole

        gradient, whole = jax.grad(loss, has_aux=True)(part)
        return whole[None], gradient

    split = PartitionSpec(None, "fsdp")
    out = jax.jit(jax.shard_map(region, mesh=mesh, in_specs=split, out_specs=(PartitionSpec("fsdp"), split),
                                check_vma=False))(matrix)  # fmt: skip
    return [np.asarray(x) for x in out]


def test_every_device_sees_the_whole_in_the_compute_dtype_and_keeps_its_part_of_the_exact_sum():
    whole, gradient = on_devices(4, "tests.parallel.test_layers:gathered")
    matrix = np.arange(1, 41).reshape(5, 8)
    assert whole.dtype == jnp.bfloat16
    for seen in whole:
        np.testing.assert_array_equal(seen.astype(np.float32), matrix)
    assert gradient.dtype == np.float32
    np.testing.assert_array_equal(gradient, np.full((5, 8), 1.0 + 2 + 3 + 4))


def test_what_is_not_split_is_left():
    blueprint = make_blueprint(CONFIG)
    layout = layout_of(CONFIG, blueprint, make_mesh(devices=jax.devices()[:1]))
    model = Zaya(CONFIG.model, jax.random.key(0))
    layer = gather_layer(layout.placed, layout.dtypes)(model)
    assert not differing(parameters(layer), parameters(model))
