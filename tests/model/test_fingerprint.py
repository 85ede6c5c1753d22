import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tests.devices_helpers import on_devices
from tests.helpers import seeds
from zaya_jax.model.fingerprint import combine_sums, fingerprint, part_sums

SHAPES = {"a": (3, 5, 7), "b": (11,), "c": ()}
DTYPES = {"a": jnp.bfloat16, "b": jnp.float32, "c": jnp.float32}


def drawn(seed):
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.normal(size=shape), DTYPES[name]) for name, shape in SHAPES.items()}


@given(seed=seeds(), name=st.sampled_from(["a", "b"]), data=st.data())
def test_a_fingerprint_tells_any_two_apart(seed, name, data):
    arrays = drawn(seed)
    expected = fingerprint(arrays)
    assert expected == fingerprint({key: arrays[key] for key in reversed(arrays)})
    flat = np.array(arrays[name]).reshape(-1)
    first, second = (data.draw(st.integers(0, flat.size - 1)) for _ in range(2))
    changed = flat.copy()
    changed[first] = np.nextafter(changed[first], changed.dtype.type(9)) if name == "b" else changed[first] * 2
    swapped = flat.copy()
    swapped[[first, second]] = flat[[second, first]]
    for other in (changed, swapped):
        digest = fingerprint({**arrays, name: jnp.asarray(other.reshape(SHAPES[name]))})
        assert (digest == expected) == (other.tobytes() == flat.tobytes())


def placed_fingerprint():
    """Of the same arrays laid out on eight devices, by one axis and by two, or on all of them."""
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    specs = {"a": PartitionSpec("x", "y"), "b": PartitionSpec(("x", "y")), "c": PartitionSpec()}
    return fingerprint({name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in even().items()})


def even():
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in (("a", (4, 8)), ("b", (8,)), ("c", ()))}


def test_a_fingerprint_does_not_depend_on_where_parameters_lie():
    assert on_devices(8, "tests.model.test_fingerprint:placed_fingerprint") == fingerprint(even())


@given(seed=seeds(), cut=st.sampled_from([0, 2, 11]))  # each is compiled
def test_parts_add_up_to_the_whole(seed, cut):
    arrays = drawn(seed)
    sums = {name: part_sums([(0, x[:cut]), (cut, x[cut:])] if x.ndim else [(0, x)]) for name, x in arrays.items()}
    assert combine_sums(sums) == fingerprint(arrays)
