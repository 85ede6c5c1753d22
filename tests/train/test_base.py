"""What adapters are of: read from another run, told apart from any other, refused where it is not what it was."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import seeds
from tests.train_helpers import CONFIG, change, on_devices, setup
from zaya_jax.config import LoraConfig, ParallelConfig, to_dict
from zaya_jax.errors import InputError
from zaya_jax.parallel.mesh import make_mesh
from zaya_jax.train.base import (
    NO_BASE,
    Base,
    abstract_base,
    check_base,
    check_beginning,
    fingerprint,
    frozen_shapes,
    note_base,
    open_base,
)
from zaya_jax.train.state import layout_of, make_blueprint

TUNED = change(CONFIG, {"lora": LoraConfig(2, 4.0), "init_from": "a run"})
SHAPES = {"a": (3, 5, 7), "b": (11,), "c": ()}
DTYPES = {"a": jnp.bfloat16, "b": jnp.float32, "c": jnp.float32}


def drawn(seed):
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.normal(size=shape), DTYPES[name]) for name, shape in SHAPES.items()}


@given(seed=seeds(), name=st.sampled_from(["a", "b"]), data=st.data())
def test_a_fingerprint_tells_any_two_apart(seed, name, data):
    arrays = drawn(seed)
    whole = fingerprint(Base(arrays, {}))
    assert whole == fingerprint(Base({key: arrays[key] for key in reversed(arrays)}, {}))
    flat = np.array(arrays[name]).reshape(-1)
    one, two = (data.draw(st.integers(0, flat.size - 1)) for _ in range(2))
    changed = flat.copy()
    changed[one] = np.nextafter(changed[one], changed.dtype.type(9)) if name == "b" else changed[one] * 2
    swapped = flat.copy()
    swapped[[one, two]] = flat[[two, one]]
    for other in (changed, swapped):
        found = fingerprint(Base({**arrays, name: jnp.asarray(other.reshape(SHAPES[name]))}, {}))
        assert (found == whole) == (other.tobytes() == flat.tobytes())


def placed_fingerprint():
    """Of the same parameters laid out on four devices."""
    config = change(CONFIG, {"parallel": ParallelConfig(fsdp=2, expert=2)})
    layout = layout_of(config, make_blueprint(config), make_mesh(config.parallel))
    params = parameters()
    return fingerprint(Base(jax.device_put(params, layout.shardings(params)), {}))


def parameters():
    rng = np.random.default_rng(0)
    names = make_blueprint(CONFIG).trained
    return {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in names.items()}


def test_a_fingerprint_does_not_depend_on_where_parameters_lie():
    assert on_devices(4, "tests.train.test_base:placed_fingerprint") == fingerprint(Base(parameters(), {}))


def test_the_note_of_a_run_is_of_its_base(tmp_path):
    first, second = Base(drawn(0), {}), Base(drawn(1), {})
    note_base(tmp_path, TUNED, first)
    assert json.loads((tmp_path / "base.json").read_text())["init_from"] == "a run"
    check_base(tmp_path, TUNED, first)
    with pytest.raises(InputError, match=r"init_from is 'a run', whose parameters are not those .* choose another"):
        check_base(tmp_path, TUNED, second)
    for text in ("", "{}", "[]", "{"):
        (tmp_path / "base.json").write_text(text)
        with pytest.raises(InputError, match="it is not known what the adapters of this run are of"):
            check_base(tmp_path, TUNED, first)
    (tmp_path / "base.json").unlink()
    with pytest.raises(InputError, match=r"base\.json cannot be read"):
        check_base(tmp_path, TUNED, first)


def test_without_adapters_there_is_no_base(tmp_path):
    assert frozen_shapes(CONFIG, setup().blueprint) == abstract_base(CONFIG, 0) == {}
    assert open_base(CONFIG, 0) == NO_BASE
    note_base(tmp_path, CONFIG, NO_BASE)
    check_base(tmp_path, CONFIG, NO_BASE)
    assert not list(tmp_path.iterdir())


def test_a_base_is_in_the_compute_dtype():
    config = change(TUNED, {"train.compute_dtype": "bfloat16"})
    found = frozen_shapes(config, make_blueprint(config))
    assert found.keys() == setup().state.params.keys()
    assert {str(found[name].dtype) for name in ("embedding", "blocks.0.attention.query")} == {"bfloat16"}
    assert found["norm.weight"].dtype == jnp.float32


@pytest.mark.parametrize(("about", "said"), [
    ({"config": to_dict(change(CONFIG, {"model.expert_size": 24}))}, "model.expert_size is 24 there and 16 here"),
    ({"config": to_dict(TUNED)}, "init_from is 'a run', which holds adapters alone; export that run"),
])  # fmt: skip
def test_what_is_no_beginning_is_refused(about, said):
    with pytest.raises(InputError, match=said):
        check_beginning(TUNED, about)
    check_beginning(TUNED, {"config": to_dict(change(CONFIG, {"model.max_positions": 128}))})
