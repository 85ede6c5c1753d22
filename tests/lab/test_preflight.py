"""Preflight: bisection, slow devices and slow groups of them, the baseline, bad input."""

import json
from pathlib import Path

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.devices_helpers import on_devices
from zaya_jax.lab.measure import preflight as module
from zaya_jax.lab.measure.preflight import Sizes, find_slow
from zaya_jax.machine.__main__ import main

HERE = "tests.lab.test_preflight:"
CONFIG = "configs/tiny.yaml"
INSTALLATION = {"packages", "processor", "memory of the host", "disk", "devices", "compilation cache", "extras"}
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
    """Where the probes run, by device, one of which has no memory left; speeds; and the bandwidth of two devices."""
    ran: dict[str, set[int]] = {}

    def seconds(call, *arrays):
        (asked,) = {device.id for array in arrays for device in array.devices()}
        if asked == 2:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no memory\nmore")
        ran.setdefault(asked, set()).update(device.id for device in call(*arrays).devices())
        return 1.0

    def of_group(call, x):
        assert {device.id for device in call(x).devices()} == {1, 3}
        return 2.0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_shortest", seconds)
        speeds = {name: module.device_speeds(name, SMALL) for name in ("matmul", "memory")}
        patch.setattr(module, "_shortest", of_group)
        together = module.bandwidth("all_reduce", [jax.devices()[1], jax.devices()[3]], SMALL)
    return ran, speeds, together


def test_each_device_is_probed_where_it_is_and_one_that_fails_is_named():
    ran, speeds, together = on_devices(8, HERE + "probed")
    assert ran == {device: {device} for device in range(8) if device != 2}
    for name, speed in {"matmul": 2 * 256.0**3, "memory": 2.0**21}.items():
        assert speeds[name] == dict.fromkeys(range(8), speed) | {2: "RESOURCE_EXHAUSTED: no memory"}
    assert together == 2**12 / 2  # of two devices an all-reduce has the bandwidth of its size


def checked(folder):
    """Run preflight three times on devices whose speeds are made up, and return each status.

    All are as fast; then device 3 computes, and device 2 communicates, at a twentieth of the speed, and results of
    collectives are wrong; then all are as fast again, but the baseline a thousand times as fast.
    """
    slow, found = {"alone": None, "together": None}, {}

    def seconds(_, *arrays):
        return 20.0 if arrays[0].devices() == {slow["alone"]} else 1.0

    def bandwidth(_, devices, sizes):
        assert sizes == SMALL
        return 5.0 if slow["together"] in devices else 100.0

    def run(name, *more):
        return main(["preflight", CONFIG, *more, "--output", f"{folder}/{name}"])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CPU", SMALL)
        patch.setattr(module, "_shortest", seconds)
        patch.setattr(module, "bandwidth", bandwidth)
        patch.setattr(module, "check_collectives", lambda: found)
        statuses = [run("preflight.json")]
        slow |= {"alone": jax.devices()[3], "together": jax.devices()[2]}
        found["failed"] = "Wrong."
        statuses.append(run("slow"))
        slow |= {"alone": None, "together": None}
        found.clear()
        baseline = json.loads(Path(folder, "preflight.json").read_text(encoding="utf-8"))
        for check in baseline["checks"]:
            check["value"] = check["value"] and 1000 * check["value"]
        Path(folder, "preflight.json").write_text(json.dumps(baseline), encoding="utf-8")
        return [*statuses, run("compared", f"measurements={folder}")]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The results of `checked` by name; those of the first stand in for the baseline it has become."""
    folder = tmp_path_factory.mktemp("preflight")
    assert on_devices(8, HERE + "checked", str(folder)) == [0, 1, 1]
    return {name: json.loads((folder / name).read_text()) for name in ("preflight.json", "slow", "compared")}


def by_check(result):
    return {check["check"]: check for check in result["checks"]}


def test_devices_that_are_alike_pass(results):
    assert "failed" not in results["preflight.json"]
    checks = {name: check for name, check in by_check(results["preflight.json"]).items() if name not in INSTALLATION}
    assert list(checks) == ["kernels", "matmul", "memory", "collectives", "all_reduce", "all_gather"]
    assert {(check["status"], check["message"]) for check in checks.values()} == {("PASS", "")}


def test_a_slow_device_is_named(results):
    checks = by_check(results["slow"])
    assert checks["kernels"]["status"] == "PASS"
    for name in ("matmul", "memory"):
        assert (checks[name]["status"], checks[name]["message"]) == ("FAIL", "device 3 reaches 5% of the median.")
    assert (checks["collectives"]["status"], checks["collectives"]["message"]) == ("FAIL", "Wrong.")


def test_a_device_that_slows_collectives_is_named(results):
    checks = by_check(results["slow"])
    assert checks["all_gather"]["message"] == checks["all_reduce"]["message"] == "Slow: device 2."
    assert checks["all_gather"]["status"] == checks["all_reduce"]["status"] == "FAIL"


def test_speeds_are_compared_with_the_recorded_ones(results):
    assert results["compared"]["failed"] == "Checks that fail: matmul, memory, all_reduce, all_gather."
    failing = [row for row in results["compared"]["checks"] if row["status"] == "FAIL"]
    assert all(row["message"].startswith("0% of the baseline, ") for row in failing)


@pytest.mark.parametrize(("arguments", "message"), [
    ("--tolerance 0", "--tolerance is 0.0, but must be above 0 and below 100."),
    ("--baseline missing", "missing cannot be read: No such file or directory."),
    ("--baseline pyproject.toml", "pyproject.toml is not JSON"),
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
