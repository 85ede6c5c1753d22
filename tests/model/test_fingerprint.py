import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import seeds
from tests.train_helpers import CONFIG, change, make_program, on_devices
from zaya_jax.config import ParallelConfig
from zaya_jax.model.fingerprint import combine_sums, fingerprint, part_sums

SHAPES = {"a": (3, 5, 7), "b": (11,), "c": ()}
DTYPES = {"a": jnp.bfloat16, "b": jnp.float32, "c": jnp.float32}


def drawn(seed):
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.normal(size=shape), DTYPES[name]) for name, shape in SHAPES.items()}


@given(seed=seeds(), name=st.sampled_from(["a", "b"]), data=st.data())
def test_a_fingerprint_tells_any_two_apart(seed, name, data):
    arrays = drawn(seed)
    whole = fingerprint(arrays)
    assert whole == fingerprint({key: arrays[key] for key in reversed(arrays)})
    flat = np.array(arrays[name]).reshape(-1)
    first, second = (data.draw(st.integers(0, flat.size - 1)) for _ in range(2))
    changed = flat.copy()
    changed[first] = np.nextafter(changed[first], changed.dtype.type(9)) if name == "b" else changed[first] * 2
    swapped = flat.copy()
    swapped[[first, second]] = flat[[second, first]]
    for other in (changed, swapped):
        digest = fingerprint({**arrays, name: jnp.asarray(other.reshape(SHAPES[name]))})
        assert (digest == whole) == (other.tobytes() == flat.tobytes())


def placed_fingerprint():
    """Of the same parameters laid out on four devices."""
    config = change(CONFIG, {"parallel": ParallelConfig(fsdp=2, expert=2)})
    params = parameters()
    return fingerprint(jax.device_put(params, make_program(config, 4).placement.shardings(params)))


def parameters():
    rng = np.random.default_rng(0)
    names = make_program(CONFIG).trained
    return {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in names.items()}


def test_a_fingerprint_does_not_depend_on_where_parameters_lie():
    assert on_devices(4, "tests.model.test_fingerprint:placed_fingerprint") == fingerprint(parameters())


@given(seed=seeds(), cut=st.integers(0, 11))
def test_parts_add_up_to_the_whole(seed, cut):
    arrays = drawn(seed)
    sums = {name: part_sums([(0, x[:cut]), (cut, x[cut:])] if x.ndim else [(0, x)]) for name, x in arrays.items()}
    assert combine_sums(sums) == fingerprint(arrays)
