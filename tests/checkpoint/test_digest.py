import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from tests.train_helpers import on_devices
from zaya_jax.checkpoint.digest import Part, array_digest, differing, digests, parts_to_save
from zaya_jax.run.digests import digest, joined, leaf_digest, read_slice, slice_text, uncovered

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


def test_a_slice_without_bounds_is_that_of_the_whole():
    assert slice_text((slice(None), slice(2, None)), (3, 5)) == "0:3,2:5"
    assert slice_text((), ()) == ""
    assert read_slice("") == ()


@pytest.mark.parametrize("text", ["1", "a:b", "0:1,", "0:1:2"])
def test_what_is_no_slice_is_refused(text):
    with pytest.raises(ValueError, match=r"unpack|invalid literal"):
        read_slice(text)


@given(arrays(), st.data())
def test_a_digest_is_of_bytes_in_c_order_and_any_flip_changes_it(array, data):
    found = array_digest(array)
    assert found == digest(array.tobytes()) == array_digest(np.asfortranarray(array))
    assert len(found) == 32
    content = bytearray(array.tobytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert digest(bytes(content)) != found


@given(arrays(), st.randoms())
def test_one_digest_of_an_array_is_that_of_its_parts_and_of_the_cut(array, random):
    whole = {slice_text(tuple(slice(None) for _ in array.shape), array.shape): array_digest(array)}
    assert leaf_digest(whole) == leaf_digest(dict(whole))
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
    first = digests([Part("x", "0:2", np.arange(2)), Part("y", "", np.zeros(()))])
    second = digests([Part("x", "2:4", np.arange(2, 4))])
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
    found, leaf = [], []
    for first, second in itertools.product(SPECS, SPECS):
        one, two = (NamedSharding(mesh, PartitionSpec(*spec)) for spec in (first, second))
        parts = parts_to_save({"x": jax.device_put(value, one)})
        expected = digests(parts)
        assert sum(part.data.size for part in parts) == value.size  # each part once, whatever is replicated
        leaf.append(leaf_digest(expected["x"]))
        same = differing({"x": jax.device_put(value, two)}, expected)
        changed = value.copy()
        changed[5, 9] += 1
        wrong = differing({"x": jax.device_put(changed, two)}, expected)
        elsewhere = len(same[1].get("x", ()))
        seen = [where for where in expected["x"] if where not in wrong[1].get("x", ())]
        covers = any(s[0].start <= 5 < s[0].stop and s[1].start <= 9 < s[1].stop for s in map(read_slice, seen))
        found.append((same[0], wrong[0], elsewhere, covers))
    return found, leaf


def test_digests_are_of_slices_whatever_the_layout():
    found, leaf = on_devices(8, "tests.checkpoint.test_digest:by_layout")
    for (first, second), (same, wrong, elsewhere, covers) in zip(itertools.product(SPECS, SPECS), found, strict=True):
        assert same == [], (first, second)
        # Either a device holds the part and sees it, or it is known to be nobody's.
        assert wrong == (["x"] if covers else []), (first, second)
        assert covers or elsewhere, (first, second)
        if second in (first, (None, None)):
            assert elsewhere == 0, (first, second)
    assert len(set(leaf)) == len(SPECS)
