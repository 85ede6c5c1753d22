import jax
import jax.numpy as jnp
import numpy as np

from tests.helpers import jit, random_model, tiny_config
from zaya_jax.model.packing import SMALL, pack_small


def stacked(layers=3):
    """Small arrays alike, one of another dtype, and two alike that are not small."""
    rng = np.random.default_rng(0)
    sizes = {"a": (5,), "b": (5,), "c": (2, 4), "d": (5,), "large": (SMALL + 1,), "larger": (SMALL + 1,)}
    arrays = {name: jnp.asarray(rng.normal(size=(layers, *size)), jnp.float32) for name, size in sizes.items()}
    return arrays | {"d": arrays["d"].astype(jnp.bfloat16)}


def test_small_arrays_that_are_alike_become_one():
    packed, _ = pack_small(stacked())
    assert sorted(x.shape for x in packed) == [(3, 2, 4), (3, 2, 5), (3, 5), (3, SMALL + 1), (3, SMALL + 1)]


def test_unpacking_a_layer_gives_its_parameters_and_their_gradients():
    arrays = jax.device_get(stacked())
    packed, unpack = pack_small(arrays)
    packed = jax.device_get(packed)
    for layer in range(3):
        expected = jax.tree.map(lambda x, layer=layer: x[layer], arrays)
        jax.tree.map(np.testing.assert_array_equal, jit(unpack)([x[layer] for x in packed]), expected)

    def loss(layer):
        return sum(jnp.sum(jnp.sin(x.astype(jnp.float32)) * index) for index, x in enumerate(jax.tree.leaves(layer)))

    result = jit(jax.grad(lambda arrays: loss(pack_small(arrays)[1]([x[1] for x in pack_small(arrays)[0]]))))(arrays)
    reference = jit(jax.grad(lambda arrays: loss(jax.tree.map(lambda x: x[1], arrays))))(arrays)
    jax.tree.map(np.testing.assert_array_equal, result, reference)


def test_a_layer_has_half_as_many_arrays():
    (block,) = random_model(tiny_config()).blocks
    assert len(pack_small(block)[0]) <= len(jax.tree.leaves(block)) / 2
