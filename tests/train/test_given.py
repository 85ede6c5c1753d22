"""A run that begins with the parameters of a folder of `transformers`."""

import dataclasses

import jax
import numpy as np
import pytest

from tests.checkpoint.saved_helpers import set_value
from tests.helpers import random_values
from tests.train_helpers import change, compile_once, differing, on_devices, small_run
from zaya_jax.config import Config, LoraConfig, ParallelConfig, to_dict
from zaya_jax.errors import InputError
from zaya_jax.hf.exporter import read_arrays, write_folder
from zaya_jax.hf.interop import import_hf
from zaya_jax.train import given
from zaya_jax.train.given import about_given, begin_with_given, check_given, parameters_alone
from zaya_jax.train.loop import run_training
from zaya_jax.train.program import make_programs
from zaya_jax.train.state import init_state


def write(folder, config: Config, dtype="float32", layout="hf", **changes):
    """A folder of a model like `config`'s, of random values, with balancing biases that have moved."""
    model = dataclasses.replace(config.model, **changes)
    values = {name: np.array(x) for name, x in random_values(model, 5).items()}
    values["blocks.0.mixture.router.state_scale"][0] = 1  # inert, and in no folder
    write_folder(folder, model, read_arrays(values), dtype, layout)
    return values


def with_folder(folder, config):
    return change(config, {"init_from": f"hf:{folder}"})


@pytest.mark.parametrize("layout", ["hf", "legacy"])
def test_parameters_are_the_folders_and_the_rest_is_fresh(layout, tmp_path):
    config = small_run(tmp_path)
    values = write(tmp_path / "model", config, layout=layout)
    config = with_folder(tmp_path / "model", config)
    program = make_programs(config)[0]
    state = begin_with_given(config, program)
    fresh = jax.jit(lambda: init_state(program))()
    for name, x in {**state.params, **state.balance}.items():
        np.testing.assert_array_equal(x, values[name], err_msg=name)
        assert x.dtype == np.float32
    assert not differing(dataclasses.replace(state, params={}, balance={}),
                         dataclasses.replace(fresh, params={}, balance={}))  # fmt: skip


@pytest.mark.soak
def test_a_run_goes_on_from_the_folder_without_it(tmp_path, monkeypatch):
    """bf16 values in fp32 masters; the folder may be gone once there is a checkpoint."""
    compile_once(monkeypatch)
    config = small_run(tmp_path)
    values = write(tmp_path / "model", config, "bfloat16")
    config = change(with_folder(tmp_path / "model", config), {"optimizer.adamw.learning_rate": 1e-12})
    result = run_training(config)
    embedding = np.asarray(result.state.params["embedding"])
    np.testing.assert_allclose(embedding, np.asarray(values["embedding"].astype("bfloat16"), np.float32), atol=1e-8)
    (tmp_path / "model").rename(tmp_path / "gone")
    assert not differing(run_training(config).state, result.state)
    other = change(config, {"run_dir": str(tmp_path / "other")})
    with pytest.raises(InputError, match=r"model/config\.json cannot be read"):
        run_training(other)


def test_the_first_key_that_differs_is_named(tmp_path):
    config = small_run(tmp_path)
    write(tmp_path / "model", config, num_experts=8)
    with pytest.raises(InputError, match=r"^The folder init_from is of another architecture: model\.num_experts is 8 "
                                         r"there and 4 here"):  # fmt: skip
        run_training(with_folder(tmp_path / "model", config))
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_positions_may_differ_and_a_pattern_may_be_written_in_two_ways(tmp_path):
    config = small_run(tmp_path)
    sliding = change(config, {"model.num_layers": 4, "model.layer_pattern": ("full", "sliding"),
                              "model.sliding_window": 3})  # fmt: skip
    write(tmp_path / "sliding", sliding, rope_base=77.0, max_positions=128)
    about = about_given(with_folder(tmp_path / "sliding", sliding))["config"]["model"]
    assert about["layer_pattern"] == ["full", "sliding"]
    assert about["rope_base"] == 77.0
    write(tmp_path / "full", config)
    full = change(config, {"model.sliding_window": 9})
    assert about_given(with_folder(tmp_path / "full", full))["config"]["model"]["sliding_window"] == 9


def test_what_was_trained_and_what_was_not_is_told_apart(tmp_path, finished):
    whole = change(finished[0], {"init_from": str(finished[1].run_dir)})
    assert not parameters_alone(whole)
    write(tmp_path / "model", whole)
    folder = with_folder(tmp_path / "model", whole)
    assert parameters_alone(folder)
    import_hf(tmp_path / "model", tmp_path / "imported")
    imported = change(whole, {"init_from": str(tmp_path / "imported")})
    assert parameters_alone(imported)
    program = make_programs(whole)[0]
    assert not differing(begin_with_given(imported, program), begin_with_given(folder, program))
    set_value(tmp_path / "model", "model.norm.weight", np.inf)
    import_hf(tmp_path / "model", tmp_path / "infinite", allow_nonfinite=True)
    for wrong, named in (
        (folder, "tensor model.norm.weight"),
        (change(whole, {"init_from": str(tmp_path / "infinite")}), "parameter norm.weight"),
    ):
        with pytest.raises(InputError, match=f"{named}.* NaN or infinite values"):
            begin_with_given(wrong, program)


def test_adapters_are_no_beginning(tmp_path, monkeypatch):
    config = small_run(tmp_path)
    tuned = change(config, {"lora": LoraConfig(2, 4.0), "init_from": "a run"})
    monkeypatch.setattr(given, "about_given", lambda _: {"config": to_dict(tuned)})
    with pytest.raises(InputError, match="init_from is 'a run', which holds adapters alone; export that run"):
        check_given(tuned)


def begin_on_devices(config: Config) -> dict[str, tuple[np.ndarray, bool]]:
    """Of each parameter its value, and whether it lies as the state of the phase does; runs where there are devices."""
    program = make_programs(config)[0]
    state, abstract = begin_with_given(config, program), program.abstract_state
    jax.tree.map(lambda x, a: (x.sharding.is_equivalent_to(a.sharding, x.ndim) or pytest.fail(str(x.sharding))),
                 state, abstract)  # fmt: skip
    values, wanted = {**state.params, **state.balance}, {**abstract.params, **abstract.balance}
    return {name: (np.asarray(x), x.sharding == wanted[name].sharding) for name, x in values.items()}


def test_parameters_go_into_the_shards_of_the_phase(tmp_path):
    config = small_run(tmp_path)
    values = write(tmp_path / "model", config, layout="legacy")
    config = change(with_folder(tmp_path / "model", config), {"parallel": ParallelConfig(fsdp=4, expert=2)})
    found = on_devices(8, "tests.train.test_given:begin_on_devices", config)
    assert found.keys() == values.keys()
    for name, (value, in_place) in found.items():
        np.testing.assert_array_equal(value, values[name], err_msg=name)
        assert in_place, name
