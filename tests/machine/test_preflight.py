"""Preflight: bisection, slow devices and slow groups of them, the baseline, jobs of several processes, bad input."""

import json

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.devices_helpers import on_devices
from tests.parallel.processes_helpers import finish_job, start_job
from zaya_jax.machine.__main__ import main
from zaya_jax.machine.preflight import probes
from zaya_jax.machine.preflight.bisection import find_slow
from zaya_jax.machine.preflight.probes import Sizes

HERE = "tests.machine.test_preflight:"
CONFIG = "configs/tiny.yaml"
SMALL = Sizes(256, "float32", 2**20, 2**12)


@given(st.integers(3, 200), st.data())
def test_bisection_names_the_slow_device_of_any_number(n, data):
    slow = data.draw(st.integers(0, n - 1))
    measured = []

    def measure(group):
        measured.append(len(group))
        noise = data.draw(st.floats(0.95, 1.0)) if len(measured) < 20 else 1.0
        return noise * (0.5 if slow in group else 1.0)

    found = find_slow(range(n), measure, 0.15)
    # One device against two cannot be compared before one of them is known to be good.
    assert found == ([slow] if n > 3 else [])
    assert all(count >= 2 for count in measured)


@given(st.integers(2, 64), st.floats(0.86, 1.0))
def test_alike_devices_are_not_slow(n, share):
    assert find_slow(range(n), lambda group: share if 0 in group else 1.0, 0.15) == []


def test_a_half_that_was_slow_once_is_not_slow():
    speeds = iter([0.1, 1.0, 1.0, 1.0])
    assert find_slow(range(4), lambda _: next(speeds), 0.15) == []


def slowed(folder, slow, collectives):
    """Run preflight on the devices of this process, one of which does its work twenty times; returns the status."""
    seconds = probes._seconds

    def repeatedly(call, *arrays):
        return sum(seconds(call, *arrays) for _ in range(20 if is_slow(arrays[0]) else 1))

    def is_slow(array):
        devices = {device.id for device in array.devices()}
        return slow in devices if collectives else devices == {slow}

    arguments = [CONFIG, "--tolerance", "80", "--output", f"{folder}/result"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probes, "CPU", SMALL)
        patch.setattr(probes, "_seconds", repeatedly)
        return main(["preflight", *arguments])


def run_slowed(folder, slow, collectives):
    status = on_devices(8, HERE + "slowed", str(folder), slow, collectives)
    return status, {check["check"]: check for check in json.loads((folder / "result").read_text())["checks"]}


@pytest.mark.parametrize("slow", [0, 5])
def test_a_slow_device_is_named(slow, tmp_path):
    status, checks = run_slowed(tmp_path, slow, collectives=False)
    assert status == 1
    assert checks["matmul"]["status"] == checks["memory"]["status"] == "FAIL"
    assert checks["matmul"]["message"].startswith(f"device {slow} reaches ")
    assert {check["status"] for name, check in checks.items() if name not in ("matmul", "memory")} == {"PASS"}


def test_a_device_that_slows_collectives_is_named(tmp_path):
    status, checks = run_slowed(tmp_path, 6, collectives=True)
    assert status == 1
    assert checks["all_gather"]["message"] == checks["all_reduce"]["message"] == "Slow: device 6."


def compared(folder):
    """Run preflight twice, the second time against a baseline that is ten times as fast."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probes, "CPU", SMALL)
        arguments = ["preflight", CONFIG, "--tolerance", "80", "--output", f"{folder}/preflight.json"]
        first = main(arguments)
        with open(f"{folder}/preflight.json", encoding="utf-8") as file:
            result = json.load(file)
        for check in result["checks"]:
            check["value"] = check["value"] and 10 * check["value"]
        with open(f"{folder}/preflight.json", "w", encoding="utf-8") as file:
            json.dump(result, file)
        second = ["preflight", CONFIG, f"measurements={folder}", *arguments[2:-1], f"{folder}/second"]
        return first, main(second)


def test_speeds_are_compared_with_the_recorded_ones(tmp_path):
    assert on_devices(2, HERE + "compared", str(tmp_path)) == (0, 1)
    second = json.loads((tmp_path / "second").read_text())
    assert second["failed"] == "Checks that fail: matmul, memory, all_reduce, all_gather."
    assert all("% of the baseline, " in row["message"] for row in second["checks"] if row["status"] == "FAIL")


def test_processes_check_their_devices_together(tmp_path):
    code = ("import zaya_jax.main\nfrom zaya_jax.machine import __main__ as machine\n"
            "from zaya_jax.machine.preflight import probes\nfrom tests.machine.test_preflight import SMALL\n"
            "probes.CPU = SMALL\nzaya_jax.main.main = machine.main")  # fmt: skip
    commands = [["preflight", CONFIG, "--tolerance", "95", "--output", str(tmp_path / str(index))] for index in (0, 1)]
    ends = finish_job(tmp_path, start_job(tmp_path, commands, 4, code=code))
    assert [status for status, _ in ends] == [0, 0], ends
    assert "All checks pass." in ends[0][1]
    assert "PASS" not in ends[1][1]  # process 0 speaks
    result = json.loads((tmp_path / "0").read_text())
    assert result["hardware"] | {"device": "4 × cpu", "processes": 2} == result["hardware"]
    assert [check["check"] for check in result["checks"]][-2:] == ["all_reduce", "all_gather"]


@pytest.mark.parametrize(("arguments", "message"), [
    ("--tolerance 0", "--tolerance is 0, but must be above 0 and below 100."),
    ("--baseline missing", "--baseline missing cannot be read as JSON"),
    ("--baseline pyproject.toml", "--baseline pyproject.toml cannot be read as JSON"),
    ("--baseline benchmarks/memory_cpu.json", "is no result of python -m zaya_jax.machine preflight --output."),
])  # fmt: skip
def test_bad_input_is_named(arguments, message, capsys):
    assert main(["preflight", CONFIG, *arguments.split()]) == 2
    assert message in capsys.readouterr().err


def test_a_baseline_of_other_devices_is_refused(tmp_path, capsys):
    (tmp_path / "preflight.json").write_text(json.dumps({"benchmark": "preflight", "hardware": {"device": "8 × TPU"}}))
    assert main(["preflight", CONFIG, f"measurements={tmp_path}"]) == 2
    assert f"The baseline is of 8 × TPU, but this job has {jax.device_count()} × cpu" in capsys.readouterr().err
