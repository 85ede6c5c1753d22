import functools
import json
import os

import pytest

from tests.train_helpers import small_run
from zaya_jax.bench.kernels import bench_kernels
from zaya_jax.config.stages import total_steps
from zaya_jax.hardware.environment import describe_preset
from zaya_jax.hardware.presets import PRESETS
from zaya_jax.machine import smoke as module
from zaya_jax.machine.__main__ import main
from zaya_jax.machine.context import measure_context
from zaya_jax.machine.smoke import STEPS, check_losses, parts, run_part, short_training, smoke
from zaya_jax.model.arithmetic import total_parameters


@pytest.mark.parametrize(("platform", "devices"), [("cpu", 1), ("cpu", 8), ("cuda", 1), ("rocm", 8), ("rocm", 6)])
def test_the_sizes_fit_any_number_of_devices(platform, devices):
    made = parts(platform, devices, bench_kernels)
    (run,) = made["training"].args
    assert total_steps(run) == STEPS
    assert run.train.batch.tokens // run.data.context % devices == 0
    assert run.evaluation.batch_size % devices == 0
    assert total_parameters(run.model) < 5e6 if platform == "cpu" else total_parameters(run.model) > 1e8
    # A CPU simulates devices; a GPU that is alone has none to send to.
    alone = (platform, devices) == ("cuda", 1)
    assert (made["context"].func is not measure_context) == alone
    if alone:
        assert "skipped" in made["context"]()
    # What one device has nothing to compare with.
    assert ("train step, fsdp" in made) == (devices > 1)


def test_the_losses_of_a_run_fall_and_are_the_same_when_it_is_resumed():
    falling = [5 - 0.1 * step for step in range(20)]
    assert check_losses(falling, 0.0) is None
    assert "step 8 is not finite" in str(check_losses([*falling[:7], float("nan"), *falling[8:]], 0.0))
    assert "from 5.00 to 5.00" in str(check_losses([5.0] * 20, 0.0))
    assert "losses differ by 1e-07 nats/token" in str(check_losses(falling, 1e-7))
    assert check_losses(falling, float("nan"))


def test_a_part_that_raises_or_takes_its_process_down_fails(capsys):
    assert run_part("broken", functools.partial(divmod, 1, 0))["failed"].startswith("ZeroDivisionError: ")
    assert "status 3" in run_part("broken", functools.partial(os._exit, 3))["failed"]
    assert "status 3" in capsys.readouterr().out


@pytest.mark.soak
def test_half_a_run_from_its_checkpoint_is_bitwise_the_same(tmp_path, monkeypatch):
    # Read when the part's process starts; compiles in half the time.
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")
    config = small_run(tmp_path, "checkpoint.every=6")
    result = run_part("training", functools.partial(short_training, config))
    assert len(result["losses"]) == total_steps(config) == 12
    assert result["resumed_bitwise"]
    assert result["resumed_difference"] == 0
    assert not (tmp_path / "run").exists()


@pytest.fixture
def two_parts(monkeypatch):
    """A machine, a part that passes and one that fails, in this process."""
    monkeypatch.setattr(module, "run_part", lambda _, work: work())
    machine = {"platform": "cpu", "device": "AMD Some/Thing", "devices": 1}
    monkeypatch.setattr(module, "describe_machine", lambda: machine)
    monkeypatch.setattr(
        module, "parts", lambda *_: {"bad": lambda: {"failed": "It broke."}, "good": lambda: {"figure": 1}}
    )


def test_a_failed_part_leaves_the_others_to_run_and_the_status_is_one(two_parts, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "benchmarks").mkdir()
    assert main(["smoke"]) == 1
    written = json.loads((tmp_path / "benchmarks" / "smoke_amd_some_thing.json").read_text())
    assert written["failed"] == ["bad"]
    assert list(written["parts"]) == ["machine", "bad", "good"]
    assert written["parts"]["bad"]["failed"] == "It broke."
    assert written["parts"]["good"]["figure"] == 1
    assert written["size"] == "small"
    *_, passed, failed, last = capsys.readouterr().out.splitlines()
    assert (passed, failed) == ("Passed: machine; good", "Failed: bad")
    assert "benchmarks/smoke_amd_some_thing.json" in last


def test_the_status_is_zero_where_all_is_well(two_parts, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(module, "parts", lambda *_: {})
    assert main(["smoke", "--output", str(tmp_path / "a.json")]) == 0
    assert json.loads((tmp_path / "a.json").read_text())["failed"] == []
    assert "Failed" not in capsys.readouterr().out


def test_a_folder_that_is_missing_is_told_before_anything_runs(two_parts, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(module, "run_part", lambda *_: pytest.fail("ran"))
    monkeypatch.chdir(tmp_path)
    assert main(["smoke"]) == 2
    assert "smoke.json'" in capsys.readouterr().err


def test_a_part_that_cannot_be_compared_is_still_written(two_parts, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(module, "parts", lambda *_: {"odd": lambda: {"compiled": "in another form"}})
    assert main(["smoke", "--output", str(tmp_path / "a.json")]) == 0
    assert json.loads((tmp_path / "a.json").read_text())["parts"]["odd"] == {"compiled": "in another form"}
    assert "cannot be compared" in capsys.readouterr().out


def test_all_parts_run_with_the_preset_of_training(two_parts, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(module, "select_preset", lambda _: PRESETS["h200"])
    monkeypatch.setattr(module, "parts", lambda *_: {"part": lambda: seen.append(describe_preset()) or {}})
    before = dict(os.environ)
    assert main(["smoke", "--output", str(tmp_path / "a.json")]) == 0
    assert seen[0].startswith("Preset h200: --xla")
    assert os.environ == before


@pytest.mark.soak
@pytest.mark.parametrize("devices", ["1", "2"])
def test_all_parts_pass_on_a_cpu(tmp_path, monkeypatch, devices):
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", devices)
    result = smoke(str(tmp_path / "smoke.json"), bench_kernels)
    assert result["failed"] == [], result["parts"]
    assert list(result["parts"]) == ["machine", *parts("cpu", int(devices), bench_kernels)]
    assert result["parts"]["training"]["resumed_bitwise"]
    measured = {(row["part"], row["quantity"]): row["measured"] for row in result["comparison"]}
    assert measured["kernels", "momentum"] > 0
    for layout in ("data", "fsdp")[: int(devices)]:
        part = result["parts"][f"train step, {layout}"]
        assert part["losses"][-1] < part["losses"][0]
        assert measured[f"train step, {layout}", "step"] > 0
