"""What adapters are of: read from another run, told apart from any other, refused where it is not what it was."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from tests.train_helpers import CONFIG, change, make_program, setup
from zaya_jax.config import LoraConfig
from zaya_jax.errors import InputError
from zaya_jax.train.base import (
    NO_BASE,
    Base,
    check_base,
    note_base,
    open_base,
)

TUNED = change(CONFIG, {"lora": LoraConfig(2, 4.0), "init_from": "a run"})
SHAPES = {"a": (3, 5, 7), "b": (11,), "c": ()}
DTYPES = {"a": jnp.bfloat16, "b": jnp.float32, "c": jnp.float32}


def drawn(seed):
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.normal(size=shape), DTYPES[name]) for name, shape in SHAPES.items()}


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
    assert setup().program.abstract_base == {}
    assert open_base(CONFIG, setup().program) == NO_BASE
    note_base(tmp_path, CONFIG, NO_BASE)
    check_base(tmp_path, CONFIG, NO_BASE)
    assert not list(tmp_path.iterdir())


def test_a_base_is_in_the_compute_dtype():
    config = change(TUNED, {"train.compute_dtype": "bfloat16"})
    found = make_program(config).abstract_base
    assert found.keys() == setup().state.params.keys()
    assert {str(found[name].dtype) for name in ("embedding", "blocks.0.attention.query")} == {"bfloat16"}
    assert found["norm.weight"].dtype == jnp.float32
