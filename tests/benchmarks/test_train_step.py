"""The step that fits a machine, its time by part, and what its compiled program predicts."""

import dataclasses
import functools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import train_step as module
from benchmarks.gpu_report.speed import step_figures
from benchmarks.train_step import FRACTIONS, compile_fitting, reduce_to_fit, spread, time_train_step
from tests.lab.compilers.test_schedule import TEXT
from tests.lab.helpers import Program
from tests.report_helpers import check_form
from tests.train_helpers import CONFIG, change
from zaya_jax.config import BatchConfig, load_config
from zaya_jax.config.stages import stages
from zaya_jax.errors import InputError
from zaya_jax.hardware.data_sheets import HARDWARE, find_hardware
from zaya_jax.lab.measure.step_trace import Interval, Trace
from zaya_jax.lab.predict.calibration import get_device
from zaya_jax.lab.predict.compilers.hlo import parse
from zaya_jax.lab.predict.compilers.predict import predict
from zaya_jax.lab.predict.dry_run import memory
from zaya_jax.lab.predict.dry_run.estimate import estimate_phase, simulated_programs

H200 = HARDWARE["h200"]
STEP = change(CONFIG, {"train.batch": BatchConfig(tokens=4 * CONFIG.data.context, micro_batch=2)})


class Device:
    """A device; only GPUs count their memory."""

    def __init__(self, kind):
        self.device_kind = kind

    def memory_stats(self):
        return {"peak_bytes_in_use": 50e9} if "NVIDIA" in self.device_kind else None


class Programs:
    """Programs that compile to `text`, and count how often they do."""

    def __init__(self, text=""):
        self.text, self.compiled = text, 0

    def __getitem__(self, phase):
        return self

    def check(self):
        pass

    def compile(self, stage):
        self.compiled += 1
        return Program(text=self.text)


@functools.cache
def estimated(config, devices, *more):
    """The estimate, which takes a second, with residuals that are made up."""
    return estimate_phase(simulated_programs(config, devices), *more)


def trace(kind):
    """Two steps, in ms: two instructions of the experts, and one of the router that runs three times."""
    spans = [(0, 2, "experts", "long"), (2, 3, "router", "short"), (3, 4, "router", "short"), (4, 5, "experts", "half"),
             (5, 8, "experts", "long"), (8, 9, "router", "short")]  # fmt: skip
    intervals = [Interval(1e6 * start, 1e6 * end, part, "fusion", name) for start, end, part, name in spans]
    return Trace(intervals, parse(TEXT), 1, 2, 0.01, kind, 1)


@pytest.fixture
def run(monkeypatch):
    """The part on a device of some kind, whose compiler returns some text, without compiling or running."""

    def part(kind, text, losses=(5.0, 4.0)):
        monkeypatch.setattr(module.jax, "devices", lambda: [Device(kind)])
        monkeypatch.setattr(module.jax, "device_count", lambda: 1)
        monkeypatch.setattr(module, "Programs", lambda *_: Programs(text))
        monkeypatch.setattr(module, "validated_kernels", lambda _: None)
        monkeypatch.setattr(module, "available_memory", lambda: None)
        monkeypatch.setattr(module, "time_train_steps", lambda *_: ([0.1, 0.2, 0.1], list(losses), None))
        monkeypatch.setattr(module, "simulated_programs", lambda *config_and_devices: config_and_devices)
        monkeypatch.setattr(memory, "residual_bytes", lambda *_: 10**6)
        monkeypatch.setattr(module, "estimate_phase", lambda programs, *more: estimated(*programs, *more))
        monkeypatch.setattr(module, "place_rows", lambda *_: {})
        monkeypatch.setattr(module, "trace_steps", lambda *_: None)
        monkeypatch.setattr(module, "read_trace", lambda _: trace(kind))
        return time_train_step(STEP, "data", 3)

    return part


def test_a_step_is_predicted_from_its_own_compiled_program(run):
    part = run("NVIDIA H200", TEXT)
    predicted = predict(parse(TEXT), get_device("h200", 1)).seconds
    assert part["predicted"]["seconds"] == predicted
    assert part["configurations"]["step of 2 layers, data"]["seconds"] == 0.1
    assert part["compiled"]["launches"]["step"] == 2 + 4 * 20 * 2
    assert part["compiled"]["collectives"][0]["kind"] == "all-gather"
    figures = step_figures(part, "NVIDIA H200")
    near = functools.partial(pytest.approx, rel=1e-3)
    assert figures["step"] == [0.1, "s", near(predicted)]
    assert figures["speed"] == [near(4 * 32 / 0.1), "tokens/s", near(4 * 32 / predicted)]
    flops = 100 * part["flops"] / H200.peak
    assert figures["MFU"] == [near(flops / 0.1), "%", near(flops / predicted)]
    assert figures["peak memory"] == [50, "GB", 4.2e-08]
    assert part["estimated"]["seconds"] > 0


def test_what_is_predicted_of_a_device_that_nobody_has_measured_is_a_range(run):
    kind = "AMD Instinct MI300X"
    part = run(kind, TEXT)
    figures, seconds = step_figures(part, kind), (part["predicted"]["seconds"], part["predicted"]["most"])
    least, most = (pytest.approx(end, rel=1e-3) for end in seconds)
    assert seconds[0] < seconds[1]
    assert figures["step"] == [0.1, "s", least, most]
    assert figures["speed"][2:] == [pytest.approx(4 * 32 / end, rel=1e-3) for end in reversed(seconds)]
    part["parts"]["experts"] |= {"predicted": 1e-3, "most": 2e-3}
    assert step_figures(part, kind)["part experts"] == [pytest.approx(3), "ms", 1, 2]


def test_the_time_of_a_step_is_listed_by_part_and_by_instruction(run):
    part = run("NVIDIA H200", TEXT)
    assert part["parts"]["experts"]["measured"] == pytest.approx(3e-3)
    assert [list(row.values()) for row in part["instructions"]] == [
        [2.5, 1, "experts", "fusion", "long"], [1.5, 1.5, "router", "fusion", "short"],
        [0.5, 0.5, "experts", "fusion", "half"],
    ]  # fmt: skip
    assert step_figures(part, "NVIDIA H200")["part router"][:2] == [1.5, "ms"]


@pytest.mark.parametrize(("kind", "text", "why"), [
    ("cpu", TEXT, "no data sheet of the device (cpu)"),
    ("NVIDIA H200", "HloModule of another form", "could not be read (ValueError"),
])  # fmt: skip
def test_a_step_without_a_prediction_is_still_measured_and_says_why(run, kind, text, why):
    part = run(kind, text)
    assert part["predicted"] is None
    assert why in part["not_predicted"]
    figures = step_figures(part, kind)
    check_form("step", part | {"figures": figures})
    assert figures["step"] == [0.1, "s"]
    # The compiler knows its memory on every device.
    assert figures["peak memory"] == [None if kind == "cpu" else 50, "GB", 4.2e-08]


def test_a_loss_that_is_not_finite_fails_the_part(run):
    assert "not finite" in run("cpu", TEXT, (5.0, float("nan")))["failed"]


def needed(config, devices):
    """An estimate of 3 bytes a layer, and 2 a sequence of the micro-batch."""
    return 10 + 3 * config.model.num_layers + 2 * config.batch_for(config.phases[0]).micro_batch


# --- what fits -------------------------------------------------------------------------------------------------------


@given(layers=st.integers(1, 60), pattern=st.sampled_from([("full",), ("full", "sliding")]), limit=st.integers(0, 300),
       micro_batch=st.sampled_from([1, 2, 8]))  # fmt: skip
def test_the_deepest_step_that_fits_is_taken_and_the_micro_batch_reduced_only_if_none_does(
    layers, pattern, limit, micro_batch
):
    period = len(pattern)
    model = dataclasses.replace(CONFIG.model, num_layers=layers * period, layer_pattern=pattern, sliding_window=8)
    config = change(
        dataclasses.replace(CONFIG, model=model), {"train.batch": BatchConfig(8 * 32, micro_batch=micro_batch)}
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "estimated_bytes", needed)
        if 10 + 3 * period + 2 > limit:
            with pytest.raises(InputError, match="does not fit"):
                reduce_to_fit(config, 1, limit)
            return
        fitting = reduce_to_fit(config, 1, limit)
    depth, micro = fitting.model.num_layers, fitting.batch_for(fitting.phases[0]).micro_batch
    assert depth % period == 0
    assert 10 + 3 * depth + 2 * micro <= limit
    assert depth == layers * period or 10 + 3 * (depth + period) + 2 * micro > limit
    assert micro == micro_batch or 10 + 3 * period + 2 * (2 * micro) > limit
    assert dataclasses.replace(fitting, model=config.model, phases=config.phases) == config


def test_fewer_layers_are_tried_if_the_compiler_needs_more_than_the_estimate(monkeypatch):
    programs = Programs()
    monkeypatch.setattr(memory, "residual_bytes", lambda *_: 1)
    monkeypatch.setattr(module, "Programs", lambda *_: programs)
    monkeypatch.setattr(module, "validated_kernels", lambda _: None)
    monkeypatch.setattr(module, "estimated_bytes", needed)
    assert compile_fitting(STEP, 1, H200, 42)[0] == STEP
    assert programs.compiled == 1
    with pytest.raises(InputError, match=r"needs 4\.2e-08 GB per device, but only 4\.1e-08 GB"):
        compile_fitting(STEP, 1, H200, 41)  # at 0.4 of it, one layer is estimated to fit
    assert programs.compiled == 1 + 2  # the smallest fraction makes the same program again


@pytest.mark.parametrize("devices", [1, 2, 6])
@pytest.mark.parametrize("layout", ["data", "fsdp"])
def test_each_device_gets_the_batch_of_one(layout, devices, monkeypatch):
    monkeypatch.setattr(memory, "residual_bytes", lambda *_: 1)
    config = spread(STEP, layout, devices)
    before, after = stages(STEP)[0], stages(config)[0]
    assert (after.tokens, after.steps) == (devices * before.tokens, before.steps)
    assert config.parallel_for(config.phases[0]).fsdp == (devices if layout == "fsdp" else 1)
    estimate = estimate_phase(simulated_programs(config, devices), 0, None)
    assert (estimate.axes[layout], estimate.sequences, estimate.micro_batches) == (devices, 2, 2)


@pytest.mark.soak
def test_the_8b_s_step_fits_the_gpus_that_have_a_data_sheet():
    full = load_config(module.EIGHT_B)
    depths = {}
    for name in ("mi300x", "h100"):
        config = reduce_to_fit(spread(full, "data", 1), 1, FRACTIONS[0] * HARDWARE[name].memory)
        depths[name] = config.model.num_layers
    assert depths["mi300x"] == full.model.num_layers
    assert 4 < depths["h100"] < full.model.num_layers


def test_data_sheets_are_found_by_the_names_of_runtimes():
    assert find_hardware("NVIDIA H200") is H200
    assert find_hardware("AMD Instinct MI300X") is HARDWARE["mi300x"]
    assert find_hardware("cpu") is None
