"""Rates that were measured: how they scale, when they count as changed, and the ends of what is not known."""

import json
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.lab.compilers.test_schedule import TEXT
from tests.train_helpers import ROOT
from zaya_jax.errors import InputError
from zaya_jax.hardware.data_sheets import ASSUMPTIONS, HARDWARE, SLOW, Rate
from zaya_jax.lab.predict.calibration import as_row, calibrated, find_device, get_device, kernel_sources
from zaya_jax.lab.predict.compilers.hlo import parse
from zaya_jax.lab.predict.compilers.predict import predict
from zaya_jax.lab.predict.step_time import Work, basis
from zaya_jax.ops.kernel_table import own_table, sources_digest
from zaya_jax.ops.registry import OPERATIONS
from zaya_jax.run.files import json_text

H200 = HARDWARE["h200"]
ROW = {"work": "attention", "flops": 1e12, "bytes": 1e9, "fp32": False, "seconds": 0.01}
CONTENT = {"benchmark": "calibration", "date": "2026-11-26", "hardware": {"device": "NVIDIA H200"}, "launch": 3e-6,
           "gap": 1e-6, "rates": [{**ROW, "sources": kernel_sources("attention")}]}  # fmt: skip
sizes = st.floats(1e6, 1e14)
works = st.builds(
    Work, st.just("kernel a"), sizes, st.just(0.0) | sizes, st.sampled_from(["matmul", "kernel"]), st.booleans(),
    st.just(1), st.sampled_from(["a", "b"]),
)  # fmt: skip
rates = st.lists(st.builds(Rate, st.sampled_from(["a", "b"]), sizes, sizes, st.booleans(), st.floats(1e-5, 1.0),
                           st.booleans()), max_size=4)  # fmt: skip


@given(works, rates, st.sampled_from(sorted(HARDWARE)), st.floats(1.0, 8.0))
def test_the_ends_of_a_range_are_in_order_and_grow_with_the_work(work, measured, name, factor):
    device = HARDWARE[name]._replace(rates=tuple(measured))
    fast, slow = (work.seconds(end) for end in (device, device.slowest))
    assert 0 < fast <= slow
    own = [rate for rate in measured if (rate.work, rate.fp32) == (work.name, work.fp32)]
    if own and all(rate.current for rate in own) and not work.waits(device):
        nearest = work._nearest(device)
        if Work("", nearest.bytes, nearest.flops, fp32=nearest.fp32).roofline(device) >= device.reached.launch:
            assert fast == slow  # all is known
    if len(own) <= 1:
        larger = work._replace(bytes=factor * work.bytes, flops=factor * work.flops)
        assert all(larger.seconds(end) >= 0.999 * work.seconds(end) for end in (device, device.slowest))


@given(works, st.floats(1e-4, 1.0), st.floats(1.0, 1e3))
def test_measured_work_takes_what_was_measured_and_changed_work_no_more_than_either(work, seconds, factor):
    rate = Rate(work.name, work.flops, work.bytes, work.fp32, seconds)
    device = H200._replace(rates=(rate,))
    if work.waits(device) or work.roofline(device) < H200.reached.launch:
        return
    assert work.seconds(device) == work.seconds(device.slowest) == pytest.approx(seconds)
    more = work._replace(bytes=factor * work.bytes, flops=factor * work.flops)
    assert more.seconds(device) == pytest.approx(factor * seconds)
    changed = H200._replace(rates=(rate._replace(current=False),))
    fast, slow = H200, H200.slowest
    assert work.seconds(changed) == pytest.approx(min(seconds, work.seconds(fast)))
    assert work.seconds(changed.slowest) >= max(seconds, work.seconds(fast))
    assert work.seconds(changed.slowest) == pytest.approx(max(seconds, work._replace(launches=0).seconds(slow)))


def test_a_launch_that_waits_more_than_it_works_waits_as_long_at_smaller_sizes():
    rate = Rate("a", 0.0, 4e6, False, 2e-5)  # its bytes take less than a launch
    device = H200._replace(rates=(rate,))
    work = Work("kernel a", 1e6, 0.0, "kernel", kernel="a")
    assert work.seconds(device) == 2e-5
    assert work._replace(bytes=8e6).seconds(device) == 2e-5
    assert work._replace(bytes=1e9).seconds(device) == pytest.approx(1e9 / H200.bandwidth / ASSUMPTIONS.moving)


@given(works, st.floats(1.0, 8.0))
def test_a_kernel_hides_neither_compute_nor_memory_behind_the_other(work, factor):
    """With more bytes alone, a kernel takes more; what the vendor or XLA wrote only if its bytes take longest."""
    device = H200._replace(rates=(Rate(work.name, work.flops, work.bytes, work.fp32, 1.0),))
    compute, memory = work._at_peaks(device)
    if compute + memory < device.reached.launch:
        return
    more = work._replace(bytes=factor * work.bytes).seconds(device)
    together = sum if work.rate == "kernel" else max
    assert more == pytest.approx(together((compute, factor * memory)) / together((compute, memory)))


def test_kernels_that_have_changed_are_ranges():
    device = calibrated(CONTENT, "test")
    assert [rate.current for rate in device.rates] == [True]
    assert (device.reached.launch, device.reached.gap) == (3e-6, 1e-6)
    assert device.slowest.reached == SLOW._replace(launch=3e-6, gap=1e-6)
    assert basis(device, "h200") == "Times are predicted from what one NVIDIA H200 took on 2026-11-26."
    changed = calibrated(CONTENT | {"rates": [{**ROW, "sources": "0123"}]}, "test")
    assert [rate.current for rate in changed.rates] == [False]
    assert "ranges" in basis(changed, "h200")
    of_xla = calibrated(CONTENT | {"rates": [{**ROW, "work": "matmuls", "sources": None}]}, "test")
    assert of_xla.rates[0].current


@pytest.fixture
def tune(tmp_path, monkeypatch):
    """Writes the user's table of a device, in which each operation was timed once, and returns its path."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def write(device, operations, variant="pallas"):
        path = own_table(device)
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = {}
        for name, (sources, seconds, every) in operations.items():
            size = {"dtype": "bfloat16", "rows": 8, "widths": [], "implementation": "pallas", "tiles": {},
                    "seconds": {"reference": {"plain": 1.0}, variant: {"plain": seconds, "uneven groups": 9.0}},
                    "works": [{**as_row("other", work), "times": 1} for work in every]}  # fmt: skip
            rows[name] = {"sources": sources, "sizes": [size]}
        path.write_text(json_text({"device": device, "operations": rows}))
        return path

    return write


def fresh(name):
    return sources_digest(*OPERATIONS[name].modules)


NORM = Work("kernel residual_norm", 4e9, 0.0, "kernel", kernel="residual_norm_forward")
MIX = Work("kernel cca_mix", 1e9, 0.0, "kernel", kernel="cca_mix")
names = st.sampled_from(["class_sort", "grouped_outer"])
flops = st.just(0.0) | st.floats(1e12, 1e14)
large = st.builds(
    Work, st.just("kernel"), st.floats(1e9, 1e11), flops, st.just("kernel"), st.booleans(), st.just(1), names
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(every=st.lists(large, min_size=1, max_size=4, unique_by=lambda work: work.name), seconds=st.floats(0.1, 10.0))
def test_the_kernels_of_a_table_take_together_what_it_measured(tune, every, seconds):
    tune("AMD Instinct MI300X", {"experts": (fresh("experts"), seconds, every)})
    device = get_device("mi300x", 8)
    for end in (device, device.slowest):
        assert sum(work.seconds(end) for work in every) == pytest.approx(seconds)


def test_a_current_table_goes_before_the_calibration_and_a_changed_one_is_a_range(tune):
    known = calibrated(json.loads((ROOT / "zaya_jax/lab/predict/calibrations/h200.json").read_text()), "")
    also = max((rate for rate in known.rates if rate.work == NORM.kernel), key=lambda rate: rate.bytes)
    norm = NORM._replace(bytes=also.bytes)  # which both have timed
    assert norm.seconds(known) == pytest.approx(also.seconds + known.reached.gap)
    table = tune("NVIDIA H200", {"residual_norm": (fresh("residual_norm"), 0.05, [norm]), "cca_mix": ("", 0.05, [MIX])})
    device = get_device("h200", 1)
    assert norm.seconds(device) == norm.seconds(device.slowest) == pytest.approx(0.05)
    assert MIX.seconds(device) < MIX.seconds(device.slowest), "neither is of this version's kernel"
    assert f"2026-11-26; of kernels in {table}, measured; of kernels that have changed since, ranges." in basis(
        device, ""
    )
    assert find_device("NVIDIA H200") == device
    assert get_device("h100", 1) == HARDWARE["h100"]
    tune("NVIDIA H200", {"residual_norm": ("", 0.05, [norm])})
    assert norm.seconds(get_device("h200", 1)) == norm.seconds(known), "the calibration is of today's kernel"
    tune("NVIDIA H200", {"residual_norm": (fresh("residual_norm"), 0.05, [norm])}, variant="another")
    assert get_device("h200", 1) == known, "what is chosen has no time"


def test_a_table_alone_leaves_the_rest_of_a_device_a_range(tune):
    table = tune("AMD Instinct MI300X", {"cca_mix": (fresh("cca_mix"), 0.02, [MIX, NORM._replace(kernel="")])})
    device = get_device("mi300x", 8)
    assert [rate.work for rate in device.rates] == ["cca_mix"], "rates of what XLA runs come from whole steps"
    assert MIX.seconds(device) == MIX.seconds(device.slowest) < 0.02
    assert device.slowest.reached == SLOW, "its launches were not measured"
    assert NORM.seconds(device) < NORM.seconds(device.slowest)
    assert basis(device, "mi300x").startswith("Times are ranges, since no mi300x was measured")
    assert basis(device, "mi300x").endswith(f"; of kernels in {table}, measured.")
    tune("AMD Instinct MI300X", {"cca_mix": ("", 0.02, [MIX])})
    assert "of kernels that have changed since, ranges" in basis(get_device("mi300x", 8), "mi300x")
    content = json.loads(table.read_text())
    del content["operations"]["cca_mix"]["sizes"][0]["works"][0]["bytes"]
    table.write_text(json.dumps(content))
    with pytest.raises(InputError, match="measure again") as error:
        get_device("mi300x", 8)
    assert str(table) in str(error.value)


def test_a_table_that_cannot_be_read_is_left_out_and_said(tune, capsys):
    table = tune("AMD Instinct MI300X", {"cca_mix": (fresh("cca_mix"), 0.02, [MIX])})
    table.write_text("{")
    assert get_device("mi300x", 8) == HARDWARE["mi300x"]
    said = capsys.readouterr()
    assert said.out == "", "which may be JSON"
    assert said.err.startswith("Not used: ")
    assert str(table) in said.err


@pytest.mark.parametrize(("change", "message"), [
    ({"benchmark": "collectives"}, "no measured rates"),
    ({"calibration": []}, "no measured rates"),
    ({"hardware": {"device": "cpu"}}, "no data sheet of the device"),
    ({"rates": [{"work": "attention"}]}, "measure again"),
    ({"rates": [{**ROW, "sources": None, "seconds": 0}]}, "without work or time"),
    ({"gap": "long"}, "measure again"),
])  # fmt: skip
def test_a_file_that_is_no_calibration_is_named(change, message, tmp_path):
    file = tmp_path / "calibration.json"
    file.write_text(json_text(CONTENT | change))
    with pytest.raises(InputError, match=message) as error:
        get_device(str(file), 1)
    assert str(file) in str(error.value)


def test_hardware_may_be_a_file_a_name_or_a_folder(tmp_path):
    file = tmp_path / "calibration.json"
    file.write_text(json_text(CONTENT))
    assert get_device(str(file), 8) == calibrated(CONTENT, "")
    file.write_text(json_text({"benchmark": "GPU report", "calibration": CONTENT}))
    assert get_device(str(file), 8) == calibrated(CONTENT, "")
    assert get_device("h200", 1).rates
    assert find_device("NVIDIA H200") == get_device("h200", 1)
    assert get_device("mi300x", 1) == HARDWARE["mi300x"]
    assert find_device("cpu") is None
    with pytest.raises(InputError, match="or a folder with results"):
        get_device(str(tmp_path / "missing"), 1)


def test_every_kernel_has_sources():
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "pallas_kernels").glob("*.py")]
    calls = [call for text in texts for call in re.findall(r"launch\((?:\s*)\"(\w+)\"", text)]
    assert len(calls) >= 7
    assert all(kernel_sources(name) for name in calls), calls
    assert kernel_sources("matmuls") is kernel_sources("fusions in loss") is kernel_sources("head") is None
    assert kernel_sources("layers") != kernel_sources("attention") == kernel_sources("attention_backward_keys")
    assert kernel_sources("gram") == kernel_sources(OPERATIONS["gram_polynomial"].name)


def test_a_compiled_step_on_a_device_that_was_not_measured_has_two_ends():
    prediction = predict(parse(TEXT), H200)
    assert prediction.seconds < prediction.most < prediction.seconds * SLOW.launch / ASSUMPTIONS.launch
    assert all(cost.seconds <= cost.most for cost in prediction.parts.values())
    measured = H200._replace(measured=True)
    assert predict(parse(TEXT), measured).most == prediction.seconds
