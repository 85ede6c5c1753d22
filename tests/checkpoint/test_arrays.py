"""Arrays before they are saved: names, digests, small ones together; and the recorded environment."""

import itertools
import json
import os

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from tests.checkpoint.test_store import abstract, make_state
from tests.train_helpers import CONFIG, make_program, on_devices
from tests.train_helpers import differing as differing_leaves
from zaya_jax.checkpoint.arrays import SMALL_ARRAYS, like, named, pack_arrays, unpack_array
from zaya_jax.checkpoint.digest import ArrayPart, array_digest, differing, digests, parts_to_save
from zaya_jax.checkpoint.environment import environment, versions
from zaya_jax.run.digests import digest, joined, leaf_digest, read_slice, slice_text, uncovered
from zaya_jax.train.state import init_state


def test_names_are_paths_and_keys_are_their_data():
    arrays, planned = named(make_state()), named(abstract(make_state()))
    assert {"params.blocks.0.query", "params.norm", "step", "rng"} < arrays.keys()
    assert arrays["rng"].dtype == jnp.uint32
    assert "recent" not in arrays  # which has no element
    chex.assert_trees_all_equal_shapes_and_dtypes(arrays, planned)
    assert all(x.sharding is not None for x in planned.values())


@given(st.integers(0, 9))
def test_a_state_is_what_its_arrays_say_in_whatever_order(seed):
    state = make_state(seed)
    arrays = named(state)
    restored = like(abstract(state), dict(reversed(arrays.items())))
    assert not differing_leaves(restored, state)
    assert restored["recent"].shape == (0,)  # which was left out, since it has no element


def test_no_two_leaves_of_a_training_state_have_one_name():
    state = jax.eval_shape(lambda: init_state(make_program(CONFIG)))
    assert len(named(state)) == sum(leaf.size > 0 for leaf in jax.tree.leaves(state))


SHAPES = st.lists(st.integers(1, 6), max_size=3).map(tuple)
DTYPES = ["float32", "bfloat16", "int32", "uint8", "bool"]


@st.composite
def slices(draw):
    shape = draw(SHAPES)
    starts = [draw(st.integers(0, size - 1)) for size in shape]
    return shape, tuple(
        slice(start, draw(st.integers(start + 1, size))) for start, size in zip(starts, shape, strict=True)
    )


@st.composite
def arrays(draw):
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    return np.random.default_rng(draw(st.integers(0, 99))).integers(0, 2, draw(SHAPES)).astype(dtype)


@given(slices())
def test_a_slice_is_read_as_it_was_written(case):
    shape, index = case
    text = slice_text(index, shape)
    assert read_slice(text) == index
    assert slice_text(read_slice(text), shape) == text
    assert slice_text((slice(None), slice(2, None)), (3, 5)) == "0:3,2:5"


@pytest.mark.parametrize("text", ["1", "a:b", "0:1,", "0:1:2"])
def test_what_is_no_slice_is_refused(text):
    with pytest.raises(ValueError, match=r"unpack|invalid literal"):
        read_slice(text)


@given(arrays(), st.data())
def test_a_digest_is_of_bytes_in_c_order_and_any_flip_changes_it(array, data):
    before = array_digest(array)
    assert before == digest(array.tobytes()) == array_digest(np.asfortranarray(array))
    assert len(before) == 32
    content = bytearray(array.tobytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert digest(bytes(content)) != before


@given(st.randoms())
def test_one_digest_of_an_array_is_that_of_its_parts_and_of_the_cut(random):
    parts = {"0:1": "a", "1:2": "b", "2:3": "c"}
    shuffled = list(parts.items())
    random.shuffle(shuffled)
    assert leaf_digest(dict(shuffled)) == leaf_digest(parts) != leaf_digest({**parts, "2:3": "d"})
    assert leaf_digest(parts) != leaf_digest({"0:1": "a", "1:2": "b", "2:4": "c"})


@given(st.dictionaries(st.sampled_from("abc"), arrays(), min_size=1), st.data())
def test_what_differs_is_found_and_nothing_else(held, data):
    held = {name: jnp.asarray(array) for name, array in held.items()}
    expected = digests(parts_to_save(held))
    assert uncovered(expected, {name: array.shape for name, array in held.items()}) == []
    assert differing(held, expected) == ([], {})
    changed = data.draw(st.sampled_from(sorted(held)))
    flat = np.array(held[changed]).reshape(-1)
    at = data.draw(st.integers(0, flat.size - 1))
    flat[at] = not flat[at] if flat.dtype == bool else flat[at] + flat.dtype.type(1)
    held[changed] = jnp.asarray(flat.reshape(held[changed].shape))
    assert differing(held, expected) == ([changed], {})


def test_digests_of_processes_come_together_and_what_none_has_is_known():
    first = digests([ArrayPart("x", "0:2", np.arange(2)), ArrayPart("y", "", np.zeros(()))])
    second = digests([ArrayPart("x", "2:4", np.arange(2, 4))])
    shapes = {"x": (4,), "y": ()}
    assert uncovered(joined([first, second]), shapes) == []
    assert joined([first, second]) == joined([second, first])
    assert uncovered(first, shapes) == uncovered(joined([first]), shapes) == ["x"]
    assert uncovered(second, shapes) == ["x", "y"]


SPECS = [("a", None), ("b", "a"), (("a", "b"), None), (None, ("b", "a")), (None, None)]


def by_layout():
    """On 8 devices: for each pair of layouts what `differing` says of equal arrays, and of one changed element."""
    mesh = jax.make_mesh((2, 4), ("a", "b"))
    value = np.arange(8 * 16, dtype=np.float32).reshape(8, 16)
    results, leaf = [], []
    for first, second in itertools.product(SPECS, SPECS):
        saved, read = (NamedSharding(mesh, PartitionSpec(*spec)) for spec in (first, second))
        parts = parts_to_save({"x": jax.device_put(value, saved)})
        expected = digests(parts)
        assert sum(part.data.size for part in parts) == value.size  # each part once, whatever is replicated
        leaf.append(leaf_digest(expected["x"]))
        same = differing({"x": jax.device_put(value, read)}, expected)
        changed = value.copy()
        changed[5, 9] += 1
        wrong = differing({"x": jax.device_put(changed, read)}, expected)
        elsewhere = len(same[1].get("x", ()))
        seen = [span for span in expected["x"] if span not in wrong[1].get("x", ())]
        covers = any(s[0].start <= 5 < s[0].stop and s[1].start <= 9 < s[1].stop for s in map(read_slice, seen))
        results.append((same[0], wrong[0], elsewhere, covers))
    return results, leaf


def test_digests_are_of_slices_whatever_the_layout():
    results, leaf = on_devices(8, f"{__name__}:by_layout")
    for (first, second), (same, wrong, elsewhere, covers) in zip(itertools.product(SPECS, SPECS), results, strict=True):
        assert same == [], (first, second)
        # Either a device holds the part and sees it, or it is known to be nobody's.
        assert wrong == (["x"] if covers else []), (first, second)
        assert covers or elsewhere, (first, second)
        if second in (first, (None, None)):
            assert elsewhere == 0, (first, second)
    assert len(set(leaf)) == len(SPECS)


@given(st.lists(st.tuples(st.sampled_from([*DTYPES, "float16"]), SHAPES), min_size=1, max_size=6))
def test_small_arrays_come_back_out_of_the_packed_ones_bitwise(drawn):
    generator = np.random.default_rng(0)
    arrays = {f"a.{i}": jnp.asarray(generator.integers(0, 2, shape), dtype) for i, (dtype, shape) in enumerate(drawn)}
    packed = pack_arrays(arrays)
    written, held, leaves = packed.arrays, packed.small, packed.leaves
    assert held.keys() == leaves.keys() == arrays.keys()
    assert written.keys() == {SMALL_ARRAYS}
    assert written[SMALL_ARRAYS].nbytes == sum(x.nbytes for x in arrays.values())
    for name, x in arrays.items():
        unpacked = unpack_array(written[SMALL_ARRAYS], leaves[name])
        assert (unpacked.dtype, unpacked.shape) == (x.dtype, x.shape)
        assert unpacked.tobytes() == np.asarray(x).tobytes()


def packed_on_devices():
    mesh = jax.make_mesh((8,), ("data",))
    split = jax.device_put(jnp.arange(8), NamedSharding(mesh, PartitionSpec("data")))
    replicated = jax.device_put(jnp.arange(4), NamedSharding(mesh, PartitionSpec()))
    packed = pack_arrays({"split": split, "whole": replicated, "large": jnp.zeros(2**14 // 4 + 1)})
    written, held, leaves = packed.arrays, packed.small, packed.leaves
    return (set(written), set(held), leaves["whole"]["at"], "at" in leaves["split"], written["split"] is split,
            written[SMALL_ARRAYS].view(np.int32))  # fmt: skip


def test_what_is_large_or_split_over_devices_stays_an_array_of_its_own():
    names, held, at, other, same, content = on_devices(8, f"{__name__}:packed_on_devices")
    assert names == {"split", "large", SMALL_ARRAYS}
    assert held == {"whole"}
    assert (at, other) == (0, False)
    assert same
    np.testing.assert_array_equal(content, np.arange(4))


def test_large_and_small_parts_are_all_there_is_to_save():
    arrays = {"large": jnp.arange(2.0**14), "small": jnp.arange(3), "scalar": jnp.float32(2)}
    packed = pack_arrays(arrays)
    parts = packed.large_parts() + packed.small_parts()
    assert sorted(part.name for part in parts) == sorted(arrays)
    assert all(part.data.tobytes() == np.asarray(arrays[part.name]).tobytes() for part in parts)
    assert pack_arrays({"large": arrays["large"]}).arrays.keys() == {"large"}  # without small ones nothing is packed


def test_packed_arrays_that_end_too_early_are_refused():
    with pytest.raises(ValueError, match="reshape"):
        unpack_array(np.zeros(8, np.uint8), {"dtype": "float32", "shape": [3], "at": 0})


def test_it_says_what_numbers_depend_on_and_json_keeps_it():
    recorded = {**environment(), **versions()}
    assert json.loads(json.dumps(recorded)) == recorded
    assert (recorded["jax"], recorded["devices"]) == (jax.__version__, jax.device_count())
    assert (recorded["platform"], recorded["cpus"]) == ("cpu", len(os.sched_getaffinity(0)))
