"""The report of a GPU: what is run, what is left, what is compared, and what fails it."""

import functools
import json
import os
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.__main__ import main
from benchmarks.gpu_report import determinism, runner, speed, training
from benchmarks.gpu_report.determinism import differing
from benchmarks.gpu_report.report_file import figures_table
from benchmarks.gpu_report.runner import Part, gpu_report, make_parts, run_part
from benchmarks.gpu_report.runs import large_config, small_config
from benchmarks.gpu_report.speed import kernel_figures
from tests.devices_helpers import on_devices
from tests.report_helpers import check_form
from zaya_jax.config.stages import total_steps
from zaya_jax.hardware.data_sheets import ASSUMPTIONS, HARDWARE, SLOW
from zaya_jax.hardware.environment import describe_preset
from zaya_jax.hardware.presets import PRESETS
from zaya_jax.lab.measure.tune import DECIDING
from zaya_jax.lab.predict.calibration import get_device
from zaya_jax.model.arithmetic import total_parameters

KERNELS = {"rooflines": {"copy": 4e12, "dense": 800e12}, "results": {
    "attention": {"bytes": 4e9, "flops": 80e12, "median_seconds": {"kernel": 0.2}, "reference": 5.0, "peer": None},
    "residual_norm": {"bytes": 40e9, "flops": 7.0, "median_seconds": {"kernel": 0.02}},
    "muon": {"bytes": 40e9, "flops": 7.0, "median_seconds": {"reference": 0.02}},
}}  # fmt: skip


def test_a_part_that_raises_hangs_or_takes_its_process_down_fails(capsys):
    assert run_part("broken", Part(0, divmod, (1, 0)), 60)["failed"].startswith("ZeroDivisionError: ")
    assert "status 3" in run_part("broken", Part(0, os._exit, (3,)), 60)["failed"]
    assert "status 3" in capsys.readouterr().out
    begun = time.monotonic()
    assert "ended after 2 s" in run_part("hung", Part(0, os.system, ("sleep 987 & sleep 987",)), 2)["failed"]
    assert time.monotonic() - begun < 30
    while [each for each in psutil.process_iter(["cmdline"]) if each.info["cmdline"] == ["sleep", "987"]]:
        assert time.monotonic() - begun < 60, "what it started goes with it"
        time.sleep(0.05)


@pytest.fixture
def report(monkeypatch, tmp_path):
    """A report of two parts in this process, of which one breaks; `made` are the parts that ran."""
    made, machine = [], {"platform": "cpu", "device": "AMD Some/Thing", "devices": 1, "drivers": {"amdgpu": "6"}}
    works = {"bad": {"failed": "It broke."}, "good": {"figures": {"speed": [2.0, "tokens/s", 1.0]}}}

    def part(name, *_):
        made.append(name)
        return {**(machine if name == "machine" else works[name])}

    monkeypatch.setattr(runner, "run_part", part)
    monkeypatch.setattr(runner, "make_parts", lambda *_: {name: Part(60, dict) for name in works})

    def run(*flags):
        made.clear()
        return main(["gpu_report", "--folder", str(tmp_path), "--commit", "abc", *flags])

    run.made, run.works, run.file, run.machine = made, works, tmp_path / "amd_some_thing.json", machine
    run.parts = lambda: json.loads(run.file.read_text())["parts"]
    return run


def test_a_failed_part_leaves_the_others_to_run_and_the_status_is_one(report, capsys):
    assert report() == 1
    assert [*report.file.parent.iterdir()] == [report.file]
    written = report.parts()
    assert written.keys() == {"machine", "bad", "good"}
    assert written["bad"]["failed"] == "It broke."
    for part in written.values():
        assert (part["commit"], part["size"]) == ("abc", "small")
        assert part["hardware"] | {"device": "AMD Some/Thing", "driver": "6"} == part["hardware"]
        assert "jax" in part["versions"]
        assert part["command"]
    *_, passed, failed, last = capsys.readouterr().out.splitlines()
    assert (passed, failed) == ("Passed: machine; good", "Failed: bad")
    assert str(report.file) in last


def test_what_was_traced_calibrates_predictions(report, capsys):
    work = {"part": "loss", "component": "matmuls", "kernel": "", "flops": 1e12, "bytes": 1e9, "fp32": False}
    ran = {"seconds": 0.02, "parts": {"loss": 0.02}, "works": [{**work, "times": 10, "seconds": 0.02}]}
    report.works["good"] = {"configurations": {"step": ran}}
    report.works["bad"] |= {"configurations": {"step": {**ran, "seconds": 9.0}}}
    assert report() == 1
    assert "--hardware" not in capsys.readouterr().out, "there is no data sheet"
    report.machine["device"] = "NVIDIA H200"
    report()
    file = str(report.file.with_name("nvidia_h200.json"))
    assert f"--hardware {file}" in capsys.readouterr().out
    measured = get_device(file, 1)
    assert [(rate.work, rate.seconds, rate.current) for rate in measured.rates] == [("matmuls", 0.002, True)]


def test_a_second_call_goes_on_with_what_failed_or_was_left(report, capsys):
    assert report("--minutes", "0.5") == 0
    assert report.made == ["machine"], "each part may take a minute"
    assert "No time for: bad; good. Run the command again to resume." in capsys.readouterr().out
    report()
    report.works["bad"] = {}
    assert report() == 0
    assert report.made == ["machine", "bad"]
    assert "== good: recorded before" in capsys.readouterr().out
    report("--only", "good")
    assert report.made == ["machine", "good"], "what is named runs again"
    report("--commit", "def")
    assert report.made == ["machine", "bad", "good"]


def test_a_figure_is_compared_with_the_one_that_was_adopted(report, capsys):
    folder = report.file.with_suffix("")
    folder.mkdir()
    (folder / "good.json").write_text('{"figures": {"speed": [4.0, "tokens/s"]}}')
    report()
    lines = capsys.readouterr().out.splitlines()
    assert next(line.split() for line in lines if " speed " in line)[3:] == [
        "2.00",
        "1.00",
        "2.00",
        "×",
        "its",
        "end",
        "4.00",
        "0.500",
    ]


@pytest.mark.parametrize(("flags", "message"), [
    (["--only", "god"], "--only is 'god', but must be one of machine, bad, good."),
    (["--minutes", "0"], "--minutes is 0"),
    (["--folder", f"{__file__}/gpu"], "test_gpu_report.py/gpu) cannot be written"),
])  # fmt: skip
def test_a_mistake_is_told_before_anything_runs(report, capsys, flags, message):
    assert report(*flags) == 2
    assert report.made in ([], ["machine"])
    assert message in capsys.readouterr().err


def test_all_parts_run_with_the_preset_of_training(report, monkeypatch):
    seen = []
    monkeypatch.setattr(runner, "select_preset", lambda _: PRESETS["h200"])
    monkeypatch.setattr(runner, "make_parts", lambda *_: seen.append(describe_preset()) or {})
    before = dict(os.environ)
    report()
    assert seen[0].startswith("Preset h200: --xla")
    assert os.environ == before


def test_a_damaged_part_is_made_again_and_another_file_is_left(report, capsys):
    report()
    whole = json.loads(report.file.read_text())
    damaged = ("3", '{"figures": 3, "versions": 5}')
    parts = [json.dumps({**whole, "parts": {**whole["parts"], "good": json.loads(part)}}) for part in damaged]
    for content in parts:
        report.file.write_text(content)
        report()
        assert "good" in report.made
        assert report.parts().keys() == {"machine", "bad", "good"}
    for content, reason in (("{", "is not JSON"), (json.dumps({**whole, "schema": 1}), "has schema 1")):
        report.file.write_text(content)
        assert report() == 2
        assert reason in capsys.readouterr().err
        assert report.file.read_text() == content


def test_parts_that_need_several_devices_are_left_out_on_one():
    one, two = make_parts(True, 1, Path()), make_parts(True, 2, Path())
    assert two.keys() - one.keys() == {"collectives", "step_fsdp", "context"}
    # On one GPU: each in a call, and all of them in three.
    limits = [part.seconds for part in make_parts(False, 1, Path()).values()]
    assert max(limits) < 9 * 60
    assert sum(limits) < 3 * 9 * 60
    assert total_parameters(small_config().model) < 1e6
    assert total_parameters(large_config().model) > 1e8
    assert total_steps(small_config()) == 50


def test_a_kernel_is_predicted_from_the_data_sheet():
    near = functools.partial(pytest.approx, rel=1e-3)
    h200, figures = HARDWARE["h200"], kernel_figures(KERNELS, "NVIDIA H200")
    assert figures.keys() == {"attention", "attention against XLA", "residual_norm"}
    ends = [near(1e3 * 80e12 / (h200.peak * reached.kernel)) for reached in (ASSUMPTIONS, SLOW)]
    assert figures["attention"] == [200, "ms", *ends]
    ends = [near(1e3 * 40e9 / (h200.bandwidth * reached.moving)) for reached in (ASSUMPTIONS, SLOW)]
    assert figures["residual_norm"] == [20, "ms", *ends]
    assert figures["attention against XLA"] == [5.0, "×"]
    assert kernel_figures(KERNELS, "cpu")["attention"] == [200, "ms"]


def test_a_table_has_a_line_for_each_figure_also_without_a_value():
    figures = {
        "step": [1.0, "s", 0.9, 2.0],
        "fast": [1.0, "s", 2.0, 3.0],
        "memory": [None, "GB", 4.0],
        "old": [5, "", None],
    }
    table = figures_table({"step": {"figures": figures}, "broken": {"failed": "It broke."}},
                          {"step.json": {"figures": {"step": [2.0, "s"]}}})  # fmt: skip
    assert [row[3:] for row in table.rows] == [
        ["1.00", "0.900 to 2.00", "inside", "2.00", "0.500"], ["1.00", "2.00 to 3.00", "0.50 × its end", "–", "–"],
        ["–", "4.00", "–", "–", "–"], ["5.00", "–", "–", "–", "–"]]  # fmt: skip
    assert table.remarks == ("1 of 2 figures with a prediction are inside its range.",)


def test_a_tensor_differs_if_one_repetition_or_process_does():
    same = {"a": ["1", "1"], "b": ["2", "2"]}
    assert differing([same]) == differing([same, same]) == []
    assert differing([{"a": ["1", "1"], "b": ["2", "3"]}]) == ["b"]
    assert differing([same, {"a": ["4", "4"], "b": ["2", "2"]}]) == ["a"]
    assert differing([same, {"a": ["1", "1"]}]) == ["b"]


@pytest.mark.parametrize(("small", "timed"), [(True, {"residual_norm"}), (False, set(DECIDING))])
def test_a_gpu_times_all_operations_and_emulation_one(small, timed, monkeypatch):
    asked = []

    def tune(source, overrides, repeats, seconds, only):
        asked.extend(only)
        size = {"rows": 64, "seconds": {"reference": {}, "pallas (64/1/1)": {"plain": 2e-6, "packed": 1e-6}}}
        return {"operations": {"residual_norm": {"sizes": [size]}}}

    monkeypatch.setattr(speed, "tune", tune)
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    result = speed.measure_tuning(small, 1)
    check_form("tune", result)
    figures = result["figures"]
    assert set(asked) == timed
    assert figures == {f"residual_norm, 64 rows: {what}": [0.003, "ms"] for what in ("fastest", "default")}


def collectives_of_mi300x():
    """Time the collectives of two simulated devices, as if they were MI300X."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speed, "check_collectives", lambda: {"devices": 2, "dtypes": []})
        patch.setattr(speed, "find_hardware", lambda _: HARDWARE["mi300x"])
        return speed.measure_collectives(True)


def test_collectives_are_timed_beside_the_bandwidth_of_the_link_between_two_devices():
    result = on_devices(2, "tests.benchmarks.test_gpu_report:collectives_of_mi300x")
    check_form("collectives", result)
    assert len(result["figures"]) == 3
    for value, unit, *ends in result["figures"].values():
        assert (value > 0, unit, ends) == (True, "GB/s", [44.8, 64])


def test_a_step_whose_bits_vary_fails_the_part(monkeypatch):
    calls = iter([["1", "1"], ["1", "1"], ["2", "2"], ["3", "3"], ["3", "3"]])
    monkeypatch.setattr(determinism, "repeat_step", None)

    class Side:
        def __enter__(self):
            digests = next(calls)
            return lambda: ({"params['head']": digests}, [0.2 if digests[0] == "3" else 0.1])

        def __exit__(self, *_):
            return None

    monkeypatch.setattr(determinism, "run_in_subprocess", lambda *_: Side())
    result = determinism.measure_determinism(False)
    check_form("determinism", result)
    assert "failed" not in result, "XLA may choose otherwise where nothing was kept"
    assert result["differ"]["first; chosen again"] == ["params['head']"]
    assert result["figures"]["price of train.deterministic"] == [100, "% of the step"]
    calls = iter([["1", "1"], ["4", "4"]])
    assert "(first; resumed), such as params['head']" in determinism.measure_determinism(True)["failed"]


def test_a_run_that_does_not_learn_or_differs_from_the_cpu_fails_the_part(monkeypatch):
    falls, on_cpu = [5 - 0.1 * step for step in range(20)], [3.0]

    def train(config, seconds, **environment):
        rows = [{"step": index + 1, "loss": loss} for index, loss in enumerate(falls)]
        rows[-1]["heldout_loss"] = on_cpu[0] if environment else 3.0
        timings = [{"seconds": 2.0, "data_wait": 0.5, "tokens_per_second": 100.0} for _ in rows]
        return rows, timings, 50.0

    monkeypatch.setattr(training, "_train", train)
    result = training.measure_training(False)
    assert "failed" not in result
    assert result["figures"]["waiting for data"] == [25.0, "% of the step"]
    assert result["figures"]["speed with evaluation and saves"] == [round(19 * 32 * 1024 / 50), "tokens/s"]
    on_cpu[0] = 3.1
    assert "3.1000 on the CPU" in training.measure_training(False)["failed"]
    falls[:] = [5.0] * 20
    check_form("training", training.measure_training(True))
    assert "from 5.00 to 5.00" in training.measure_training(True)["failed"]
    falls[-1] = float("nan")
    assert "to nan" in training.measure_training(True)["failed"]


@pytest.mark.soak
@pytest.mark.parametrize("devices", ["1", "2"])
def test_all_parts_pass_on_a_cpu(tmp_path, monkeypatch, devices):
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", devices)
    result = gpu_report(str(tmp_path), [], 9, None)
    assert (result["failed"], result["left"]) == ([], []), result["parts"]
    assert list(result["parts"]) == ["machine", *make_parts(True, int(devices), tmp_path)]
