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


def links(nodes, size, slow=None, slow_node=None):
    """Devices by node, and how fast a group communicates: 400 within a node, 50 between nodes, half with a slow one."""

    def measure(group):
        assert len(group) == len(set(group)) >= 2
        spanned = {device // size for device in group}
        speed = 400.0 if len(spanned) == 1 else 25.0 if slow_node in spanned else 50.0
        return speed * (0.5 if slow in group else 1.0)

    return [range(node * size, (node + 1) * size) for node in range(nodes)], measure


@given(st.integers(1, 12), st.integers(1, 9), st.data())
def test_bisection_names_the_slow_device_in_any_number_of_nodes(nodes, size, data):
    slow = data.draw(st.integers(0, nodes * size - 1))
    groups, measure = links(nodes, size, slow)
    # Two or three devices without any other cannot be told apart.
    few = nodes * size <= 3 and (nodes == 1 or size == 1)
    assert find_slow(groups, measure, 0.15) == ([] if few else [slow])


@given(st.integers(4, 12), st.integers(2, 9), st.data())
def test_bisection_names_a_node_with_a_slow_adapter(nodes, size, data):
    slow = data.draw(st.integers(0, nodes - 1))
    groups, measure = links(nodes, size, slow_node=slow)
    assert find_slow(groups, measure, 0.15) == list(groups[slow])


@given(st.integers(1, 12), st.integers(2, 8), st.floats(0.86, 1.0))
def test_alike_devices_are_not_slow(nodes, size, share):
    groups, measure = links(nodes, size)
    assert find_slow(groups, lambda group: measure(group) * (share if 0 in group else 1.0), 0.15) == []


def test_a_half_that_was_slow_once_is_not_slow():
    speeds = iter([0.1, 1.0, 1.0, 1.0])
    assert find_slow([range(4)], lambda _: next(speeds), 0.15) == []


def probed():
    """Where the probes run, by device; one of which has no memory left."""
    ran: dict[str, set[int]] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probes, "CPU", SMALL)

        def seconds(call, *arrays):
            (asked,) = {device.id for array in arrays for device in array.devices()}
            if asked == 2:
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no memory\nmore")
            ran.setdefault(asked, set()).update(device.id for device in call(*arrays).devices())
            return 1.0

        patch.setattr(probes, "_seconds", seconds)
        speeds = {name: probes.device_speeds(name, SMALL) for name in ("matmul", "memory")}
    return ran, speeds


def test_each_device_is_probed_where_it_is_and_one_that_fails_is_named():
    ran, speeds = on_devices(4, HERE + "probed")
    assert ran == {0: {0}, 1: {1}, 3: {3}}
    assert speeds["matmul"] == {0: 2 * 256.0**3, 1: 2 * 256.0**3, 2: "RESOURCE_EXHAUSTED: no memory", 3: 2 * 256.0**3}
    assert speeds["memory"][2] == "RESOURCE_EXHAUSTED: no memory"


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
    status = on_devices(4, HERE + "slowed", str(folder), slow, collectives)
    return status, {check["check"]: check for check in json.loads((folder / "result").read_text())["checks"]}


@pytest.mark.parametrize("slow", [0, 3])
def test_a_slow_device_is_named(slow, tmp_path):
    status, checks = run_slowed(tmp_path, slow, collectives=False)
    assert status == 1
    assert checks["matmul"]["status"] == checks["memory"]["status"] == "FAIL"
    assert checks["matmul"]["message"].startswith(f"device {slow} reaches ")
    assert {check["status"] for name, check in checks.items() if name not in ("matmul", "memory")} == {"PASS"}


def test_a_device_that_slows_collectives_is_named(tmp_path):
    status, checks = run_slowed(tmp_path, 2, collectives=True)
    assert status == 1
    assert checks["all_gather"]["message"] == checks["all_reduce"]["message"] == "Slow: device 2."


def compared(folder):
    """Run preflight twice, the second time against a baseline that is a thousand times as fast."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probes, "CPU", SMALL)
        arguments = ["preflight", CONFIG, "--tolerance", "80", "--output", f"{folder}/preflight.json"]
        first = main(arguments)
        with open(f"{folder}/preflight.json", encoding="utf-8") as file:
            result = json.load(file)
        for check in result["checks"]:
            check["value"] = check["value"] and 1000 * check["value"]
        with open(f"{folder}/preflight.json", "w", encoding="utf-8") as file:
            json.dump(result, file)
        second = ["preflight", CONFIG, f"measurements={folder}", *arguments[2:-1], f"{folder}/second"]
        return first, main(second)


def test_speeds_are_compared_with_the_recorded_ones(tmp_path):
    assert on_devices(4, HERE + "compared", str(tmp_path)) == (0, 1)
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
    ("--baseline benchmarks/machine_cpu/memory.json", "is no result of python -m zaya_jax.machine preflight --output."),
])  # fmt: skip
def test_bad_input_is_named(arguments, message, capsys):
    assert main(["preflight", CONFIG, *arguments.split()]) == 2
    assert message in capsys.readouterr().err


def test_a_baseline_of_other_devices_is_refused(tmp_path, capsys):
    (tmp_path / "preflight.json").write_text(json.dumps({"benchmark": "preflight", "hardware": {"device": "8 × TPU"}}))
    assert main(["preflight", CONFIG, f"measurements={tmp_path}"]) == 2
    expected = f"The result of preflight in {tmp_path} is of 8 × TPU, but this job has {jax.device_count()} × cpu"
    assert expected in capsys.readouterr().err
