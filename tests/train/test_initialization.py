"""The state before a run's first step: of `init_from`, in either form, and of adapters on frozen parameters."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.checkpoint.saved_helpers import set_value
from tests.helpers import random_values
from tests.train_helpers import (
    CONFIG,
    change,
    differing,
    make_program,
    on_devices,
    setup,
    small_run,
    start,
)
from zaya_jax.config import Config, LoraConfig, ParallelConfig
from zaya_jax.errors import InputError
from zaya_jax.hf.exporter import read_arrays, write_folder
from zaya_jax.train import run_tokenizer
from zaya_jax.train.fit import run_training
from zaya_jax.train.initialization import (
    NO_BASE,
    FrozenBase,
    check_base,
    initialize,
    load_frozen_base,
    open_init_from,
)
from zaya_jax.train.program import make_programs
from zaya_jax.train.trainer import Trainer
from zaya_jax.weights.interop import import_hf


def write(folder, config: Config, dtype="float32", layout="hf", **changes):
    """A folder of a model like `config`'s, of random values, with balancing biases that have moved."""
    model = dataclasses.replace(config.model, **changes)
    values = {name: np.array(x) for name, x in random_values(model, 5).items()}
    values["blocks.0.mixture.router.state_scale"][0] = 1  # inert, and in no folder
    write_folder(folder, model, read_arrays(values), dtype, layout)
    return values


def with_folder(folder, config):
    return change(config, {"init_from": f"hf:{folder}"})


def started(config):
    """The state that a run with this configuration starts from."""
    return initialize(make_program(config), open_init_from(config))


@pytest.mark.parametrize(("layout", "dtype"), [("hf", "bfloat16"), ("legacy", "float32")])
@pytest.mark.usefixtures("quick")
def test_parameters_are_the_folders_and_the_rest_is_fresh(layout, dtype, tmp_path):
    config = small_run(tmp_path)
    values = write(tmp_path / "model", config, dtype, layout)
    state = started(with_folder(tmp_path / "model", config))
    fresh = start(config)
    kept = {name: values[name].astype(dtype) for name in state.params}  # in fp32 masters; biases are never low
    for name, x in {**state.params, **state.balance}.items():
        np.testing.assert_array_equal(x, np.float32(kept.get(name, values[name])), err_msg=name)
        assert x.dtype == np.float32
    assert not differing(dataclasses.replace(state, params={}, balance={}),
                         dataclasses.replace(fresh, params={}, balance={}))  # fmt: skip


def test_the_keys_that_differ_are_named_and_their_values_fit(tmp_path):
    config = small_run(tmp_path)
    other = {"model.num_experts": 8, "model.num_layers": 1 + config.model.num_layers, "model.rope_base": 77.0}
    write(tmp_path / "model", change(config, other))
    with pytest.raises(InputError, match=r"^init_from=hf:.* Set the same values, or leave out init_from") as end:
        run_training(with_folder(tmp_path / "model", config))
    assert re.findall(r"(model\.\S+)=(\d+) \(this configuration has (\d+)\)", str(end.value)) == [
        (key, str(other[key]), str(getattr(config.model, key[6:]))) for key in ("model.num_layers", "model.num_experts")
    ]
    assert "layer_pattern" not in str(end.value)  # the folder has it in full
    open_init_from(with_folder(tmp_path / "model", change(config, {key: other[key] for key in other if "num" in key})))
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_positions_may_differ_and_a_pattern_may_be_written_in_two_ways(tmp_path):
    config = small_run(tmp_path)
    sliding = change(config, {"model.num_layers": 4, "model.layer_pattern": ("full", "sliding"),
                              "model.sliding_window": 3})  # fmt: skip
    write(tmp_path / "sliding", sliding, rope_base=77.0, max_positions=128)
    assert open_init_from(with_folder(tmp_path / "sliding", sliding)).config.layer_pattern == ("full", "sliding") * 2
    write(tmp_path / "full", config)
    assert open_init_from(with_folder(tmp_path / "full", change(config, {"model.sliding_window": 9}))) is not None


@pytest.mark.usefixtures("quick")
def test_a_run_brings_its_optimizer_and_an_import_brings_parameters(tmp_path, finished):
    config, result = finished
    whole = change(config, {"init_from": str(result.run_dir)})
    state = started(whole)
    for name in ("params", "balance", "opt_state", "balance_state"):
        assert not differing(getattr(state, name), getattr(result.state, name))
    assert int(state.step) == 0
    write(tmp_path / "model", whole)
    folder = with_folder(tmp_path / "model", whole)
    import_hf(tmp_path / "model", tmp_path / "imported")
    assert not differing(started(change(whole, {"init_from": str(tmp_path / "imported")})), started(folder))
    set_value(tmp_path / "model", "model.norm.weight", np.inf)
    import_hf(tmp_path / "model", tmp_path / "infinite", allow_nonfinite=True)
    for wrong, named in (
        (folder, "tensor model.norm.weight"),
        (change(whole, {"init_from": str(tmp_path / "infinite")}), "parameter norm.weight"),
    ):
        with pytest.raises(InputError, match=f"{named}.* NaN or infinite values"):
            started(wrong)


def test_a_fresh_run_finds_what_init_from_names_once(tmp_path, quick, monkeypatch):
    config = small_run(tmp_path)
    write(tmp_path / "model", config)
    monkeypatch.setattr(run_tokenizer, "tokenizer_folder", lambda source: pytest.fail(f"{source} is looked for again"))
    monkeypatch.setattr(Trainer, "record_changes", lambda trainer: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run_training(with_folder(tmp_path / "model", config))


def start_on_devices(config: Config) -> dict[str, tuple[np.ndarray, bool]]:
    """Of each parameter its value, and whether it lies as the state of the phase does; runs where there are devices."""
    program = make_programs(config)[0]
    state, abstract = initialize(program, open_init_from(config)), program.abstract_state
    jax.tree.map(lambda x, a: (x.sharding.is_equivalent_to(a.sharding, x.ndim) or pytest.fail(str(x.sharding))),
                 state, abstract)  # fmt: skip
    values, expected = {**state.params, **state.balance}, {**abstract.params, **abstract.balance}
    return {name: (np.asarray(x), x.sharding == expected[name].sharding) for name, x in values.items()}


def test_parameters_go_into_the_shards_of_the_phase(tmp_path):
    config = small_run(tmp_path)
    values = write(tmp_path / "model", config, layout="legacy")
    config = change(with_folder(tmp_path / "model", config), {"parallel": ParallelConfig(fsdp=4, expert=2)})
    placed = on_devices(8, "tests.train.test_initialization:start_on_devices", config)
    assert placed.keys() == values.keys()
    for name, (value, in_place) in placed.items():
        np.testing.assert_array_equal(value, values[name], err_msg=name)
        assert in_place, name


# --- what adapters are trained on ------------------------------------------------------------------------------

TUNED = change(CONFIG, {"lora": LoraConfig(2, 4.0), "init_from": "a run"})


def drawn(seed):
    rng = np.random.default_rng(seed)
    shapes = {"a": ((3, 5, 7), jnp.bfloat16), "b": ((11,), jnp.float32), "c": ((), jnp.float32)}
    return {name: jnp.asarray(rng.normal(size=shape), dtype) for name, (shape, dtype) in shapes.items()}


def test_a_run_knows_its_base_by_what_it_holds(tmp_path):
    first, second = FrozenBase(drawn(0), {}), FrozenBase(drawn(1), {})
    check_base(tmp_path, TUNED, first, is_new=True)
    assert json.loads((tmp_path / "base.json").read_text())["init_from"] == "a run"
    check_base(tmp_path, TUNED, first, is_new=False)
    with pytest.raises(InputError, match=r"init_from=a run .* choose another run_dir"):
        check_base(tmp_path, TUNED, second, is_new=False)
    for text in ("", "{}", "[]", "{"):
        (tmp_path / "base.json").write_text(text)
        with pytest.raises(InputError, match=r"base\.json cannot be read"):
            check_base(tmp_path, TUNED, first, is_new=False)


def test_without_adapters_there_is_no_base(tmp_path):
    assert setup().program.abstract_base == {}
    assert load_frozen_base(setup().program, None) == NO_BASE
    check_base(tmp_path, CONFIG, NO_BASE, is_new=True)
    check_base(tmp_path, CONFIG, NO_BASE, is_new=False)
    assert not list(tmp_path.iterdir())


def test_a_base_is_in_the_compute_dtype():
    base = make_program(change(TUNED, {"train.compute_dtype": "bfloat16"})).abstract_base
    assert base.keys() == setup().state.params.keys()
    assert {str(base[name].dtype) for name in ("embedding", "blocks.0.attention.query")} == {"bfloat16"}
    assert base["norm.weight"].dtype == jnp.float32
