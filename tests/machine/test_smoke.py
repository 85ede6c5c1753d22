import contextlib
import functools
import json
import os
import sys

import pytest

from tests.train_helpers import small_run
from zaya_jax.bench import __main__ as command
from zaya_jax.config.stages import total_steps
from zaya_jax.errors import InputError
from zaya_jax.machine import smoke as bench
from zaya_jax.machine.smoke import STEPS, guarded, judge, parts, run_part, short_training, sizes_for, smoke, time_step
from zaya_jax.machine.subprocesses import Passes
from zaya_jax.model.arithmetic import total_parameters, training_flops_per_token


@pytest.mark.parametrize(("platform", "devices"), [("cpu", 1), ("cpu", 8), ("cuda", 1), ("rocm", 8), ("rocm", 6)])
def test_the_short_run_fits_any_number_of_devices(platform, devices):
    sizes = sizes_for(platform, devices)
    sizes.run.check()
    assert total_steps(sizes.run) == STEPS
    assert sizes.run.train.batch.tokens // sizes.run.data.context % devices == 0
    assert sizes.run.evaluation.batch % devices == 0
    assert total_parameters(sizes.run.model) < 5e6 if platform == "cpu" else total_parameters(sizes.run.model) > 1e8


@pytest.mark.parametrize(("platform", "devices", "measured"), [("cpu", 1, True), ("cuda", 1, False), ("rocm", 2, True)])
def test_context_parallelism_is_measured_where_devices_can_stand_for_it(platform, devices, measured):
    sizes = sizes_for(platform, devices)
    assert (sizes.context is not None) == measured
    if not measured:
        assert "one GPU" in parts(sizes)["context"]()["skipped"]


def test_a_run_is_judged_by_its_losses():
    falling = [5 - 0.1 * step for step in range(20)]
    assert judge(falling, 0.0, 0.0) is None
    assert judge([*falling[:7], float("nan"), *falling[8:]], 0.0, 0.0) == "The loss of step 8 is not finite."
    assert judge([5.0] * 20, 0.0, 0.0) == "The loss went from 5.00 to 5.00, but should fall by 0.5 at least."
    assert judge(falling, 0.1, 0.05) == "The resumed run differs by 0.1 nats/token, but may by 0.05."
    assert judge(falling, float("nan"), 0.05)


def test_a_part_that_raises_has_its_sentence():
    def work():
        raise InputError("This is wrong.")

    assert guarded(work) == {"failed": "InputError: This is wrong."}
    assert guarded(lambda: 1 / 0)["failed"] == "ZeroDivisionError: division by zero"
    assert guarded(dict) == {}


def test_a_part_that_takes_its_process_down_is_told(capsys):
    found = run_part("broken", functools.partial(os._exit, 3))
    assert found["failed"] == "The measured process ended with status 3."
    assert capsys.readouterr().out.startswith("== broken\n   The measured process ended")


@pytest.mark.soak
def test_half_a_run_from_its_checkpoint_is_bitwise_the_same(tmp_path, monkeypatch):
    # Read when the part's process starts; compiles in half the time.
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")
    config = small_run(tmp_path, "checkpoint.every=6")
    found = run_part("training", functools.partial(short_training, config))
    assert len(found["losses"]) == total_steps(config) == 12
    assert found["resumed_bitwise"]
    assert found["resumed_difference"] == 0
    assert not (tmp_path / "run").exists()


def test_a_step_is_timed_without_its_peer(monkeypatch, capsys):
    made = []
    monkeypatch.setattr(
        bench, "run_in_subprocess", lambda *arguments: made.append(arguments) or contextlib.nullcontext(dict)
    )
    monkeypatch.setattr(
        bench, "interleave", lambda steps, repeats: {name: Passes([2.0] * repeats, []) for name in steps}
    )
    config = sizes_for("cpu", 1).run
    found = time_step(config, ("float32", "bfloat16"), 3)
    assert [one[2] for one in made] == ["float32", "bfloat16"]
    assert made[0][3].shape == (4, 257)
    assert found["tokens"] == 1024
    assert found["results"]["bfloat16"] == {
        "tokens_per_second": 512.0,
        "tflops_per_second": pytest.approx(512 * training_flops_per_token(config.model, 256) / 1e12, rel=1e-3),
        "seconds": [2.0] * 3,
    }


def here(name, work):
    return {**guarded(work), "seconds": 0.0}


@pytest.fixture
def two_parts(monkeypatch):
    """A machine, a part that is well and one that fails, in this process."""
    monkeypatch.setattr(bench, "run_part", here)
    monkeypatch.setattr(
        bench, "describe_machine", lambda: {"platform": "cpu", "device": "AMD Some/Thing", "devices": 1}
    )
    monkeypatch.setattr(bench, "parts", lambda _: {"bad": lambda: 1 / 0, "good": lambda: {"figure": 1}})


def test_a_failed_part_leaves_the_others_to_run_and_the_status_is_one(two_parts, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "benchmarks").mkdir()
    monkeypatch.setattr(sys, "argv", ["bench", "smoke"])
    assert command.main(["smoke"]) == 1
    written = json.loads((tmp_path / "benchmarks" / "smoke_amd_some_thing.json").read_text())
    assert written["failed"] == ["bad"]
    assert list(written["parts"]) == ["machine", "bad", "good"]
    assert written["parts"]["bad"]["failed"] == "ZeroDivisionError: division by zero"
    assert written["parts"]["good"]["figure"] == 1
    assert written["size"] == "small"
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("These parts failed: bad. benchmarks/smoke_amd_some_thing.json holds what was found")


def test_the_status_is_zero_where_all_is_well(two_parts, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "parts", lambda _: {})
    assert command.main(["smoke", "--output", str(tmp_path / "a.json")]) == 0
    assert json.loads((tmp_path / "a.json").read_text())["failed"] == []
    assert "All parts are well." in capsys.readouterr().out


def test_a_folder_that_is_missing_is_told_before_anything_runs(two_parts, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "run_part", lambda *_: pytest.fail("ran"))
    monkeypatch.chdir(tmp_path)
    assert command.main(["smoke"]) == 2
    assert "smoke.json', but must be a file in a folder that exists" in capsys.readouterr().err


@pytest.mark.soak
def test_all_parts_are_well_on_a_cpu(tmp_path):
    result = smoke(str(tmp_path / "smoke.json"))
    assert result["failed"] == [], result["parts"]
    assert list(result["parts"]) == ["machine", *parts(sizes_for("cpu", 1))]
    assert result["parts"]["training"]["resumed_bitwise"]
    assert result["parts"]["step"]["results"]["float32"]["tokens_per_second"] > 0
