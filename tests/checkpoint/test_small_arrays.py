import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from tests.train_helpers import on_devices
from zaya_jax.checkpoint.small_arrays import SMALL_ARRAYS, pack_arrays, unpack_array

DTYPES = ["float32", "bfloat16", "int32", "uint8", "bool", "float16"]


@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(1, 4), max_size=3)), min_size=1, max_size=6))
def test_small_arrays_come_back_out_of_the_bundle_bitwise(drawn):
    generator = np.random.default_rng(0)
    arrays = {f"a.{i}": jnp.asarray(generator.integers(0, 2, shape), dtype) for i, (dtype, shape) in enumerate(drawn)}
    packed = pack_arrays(arrays)
    written, held, leaves = packed.arrays, packed.small, packed.leaves()
    assert held.keys() == leaves.keys() == arrays.keys()
    assert written.keys() == {SMALL_ARRAYS}
    assert written[SMALL_ARRAYS].nbytes == sum(x.nbytes for x in arrays.values())
    for name, x in arrays.items():
        found = unpack_array(written[SMALL_ARRAYS], leaves[name])
        assert (found.dtype, found.shape) == (x.dtype, x.shape)
        assert found.tobytes() == np.asarray(x).tobytes()


def packed_on_two_devices():
    mesh = jax.make_mesh((2,), ("data",))
    split = jax.device_put(jnp.arange(4), NamedSharding(mesh, PartitionSpec("data")))
    whole = jax.device_put(jnp.arange(4), NamedSharding(mesh, PartitionSpec()))
    packed = pack_arrays({"split": split, "whole": whole, "large": jnp.zeros(2**14 // 4 + 1)})
    written, held, leaves = packed.arrays, packed.small, packed.leaves()
    return (
        set(written),
        set(held),
        leaves["whole"]["at"],
        "at" in leaves["split"],
        written["split"] is split,
        written[SMALL_ARRAYS].view(np.int32),
    )


def test_what_is_large_or_split_over_devices_stays_an_array_of_its_own():
    names, held, at, other, same, content = on_devices(2, f"{__name__}:packed_on_two_devices")
    assert names == {"split", "large", SMALL_ARRAYS}
    assert held == {"whole"}
    assert (at, other) == (0, False)
    assert same
    np.testing.assert_array_equal(content, np.arange(4))


def test_without_small_arrays_there_is_no_bundle():
    packed = pack_arrays({"large": jnp.zeros(2**14)})
    assert packed.arrays.keys() == {"large"}
    assert packed.small == {}
    assert packed.leaves() == {"large": {"dtype": "float32", "shape": [2**14]}}
    assert packed.small_parts() == []


def test_large_and_small_parts_are_all_there_is_to_save():
    arrays = {"large": jnp.arange(2.0**14), "small": jnp.arange(3), "scalar": jnp.float32(2)}
    packed = pack_arrays(arrays)
    parts = packed.large_parts() + packed.small_parts()
    assert sorted(part.name for part in parts) == sorted(arrays)
    assert all(part.data.tobytes() == np.asarray(arrays[part.name]).tobytes() for part in parts)


def test_a_bundle_that_ends_too_early_is_told():
    with pytest.raises(ValueError, match="reshape"):
        unpack_array(np.zeros(8, np.uint8), {"dtype": "float32", "shape": [3], "at": 0})
