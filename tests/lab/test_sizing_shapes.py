"""The search for widths: its front is what brute force finds, its bounds hold, and its overrides make each point."""

import dataclasses
import json
from collections import Counter
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.lab.helpers import share_states
from zaya_jax.config import load_config
from zaya_jax.config.phases import Remat
from zaya_jax.config.stages import micro_batch, stages
from zaya_jax.hardware.data_sheets import HARDWARE
from zaya_jax.lab.predict.calibration import get_device
from zaya_jax.lab.predict.dry_run import memory
from zaya_jax.lab.predict.dry_run import search as settings_search
from zaya_jax.lab.predict.dry_run.estimate import TARGET, estimate_decode, estimate_phase, simulated_programs
from zaya_jax.lab.predict.dry_run.search import (
    ActivationTable,
    least_activations,
    micro_batch_sizes,
    single_phase,
    suggest,
    with_settings,
)
from zaya_jax.lab.predict.sizing import shapes as shapes_module
from zaya_jax.lab.predict.sizing.shapes import (
    candidate_shapes,
    dominates,
    pareto_front,
    search,
    whole_node_layouts,
)
from zaya_jax.machine.__main__ import main
from zaya_jax.model.arithmetic import active_parameters, total_parameters
from zaya_jax.ops.registry import select_kernels
from zaya_jax.parallel.mesh import batch_shards, make_mesh

RELEASED = load_config("configs/zaya1_8b.yaml")
TINY = [
    "model.num_query_heads=4",
    "model.num_kv_heads=2",
    "train.compute_dtype=bfloat16",
    "train.batch.tokens=16384",
    "data.context=64",
]
SMALL = load_config("configs/tiny.yaml", TINY)
# Few parameters, so that an estimate takes half of the time, and many sizes of micro-batches.
PLAIN = load_config("configs/tiny.yaml", [*TINY, "model.attention=gqa", "model.router=linear",
                                          "model.residual_scaling=false", "train.batch.tokens=1048576"])  # fmt: skip
# A small memory, and launches so short that other layers and widths matter as well.
H200 = HARDWARE["h200"]
DEVICE = H200._replace(memory=0.5e9, reached=H200.reached._replace(launch=2e-8))


@pytest.fixture
def counted_at_once(monkeypatch):
    """Residuals take a second to count. These obey the same bound, and are not in the order of their policies."""
    factors = {"none": 2.0, "dots": 1.2, "full": 1.5}

    def count(program, sequences, context):
        return int(factors[program.remat] * least_activations(program, sequences, context).kept) + 10**6

    for module in (memory, settings_search):
        monkeypatch.setattr(module, "residual_bytes", count)
    share_states(monkeypatch)


@pytest.fixture
def few_widths(monkeypatch):
    """Some of the factors, since each shape without its depth takes milliseconds to count."""
    monkeypatch.setattr(shapes_module, "WIDTHS", shapes_module.WIDTHS[2:5])
    monkeypatch.setattr(shapes_module, "HEADS", shapes_module.HEADS[:2])
    monkeypatch.setattr(shapes_module, "EXPERTS", shapes_module.EXPERTS[1:6:2])


# Few distinct values, so that many are equal.
POINTS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)) | st.tuples(st.floats(0, 1), st.floats(0, 1)))


@given(POINTS, st.randoms(use_true_random=False))
def test_the_front_is_what_no_point_dominates_in_any_order(points, generator):
    front = pareto_front(points)
    chosen = [points[index] for index in front]
    assert len(set(front)) == len(front)
    assert [first for first, _ in chosen] == sorted(first for first, _ in chosen)
    assert not any(dominates(point, best) for best in chosen for point in points)
    dropped = Counter(points) - Counter(chosen)
    assert all(any(dominates(best, point) for best in chosen) for point in dropped)
    assert not set(dropped) & set(chosen)  # of equal points all or none
    shuffled = generator.sample(points, len(points))
    assert Counter(shuffled[index] for index in pareto_front(shuffled)) == Counter(chosen)


def brute_force(config, devices, hardware, shapes):
    """Estimate every candidate. All that fit, by values; and how many there were."""
    fitting, count = [], 0
    for shape in shapes:
        changed, table = dataclasses.replace(config, model=shape), ActivationTable()
        kernels = select_kernels(TARGET, shape, config.train.compute_dtype)
        decode = estimate_decode(shape, config.context_for(config.phases[0]), config.train.compute_dtype, hardware)
        for parallel in whole_node_layouts(changed, 0, devices, hardware.node_size):
            sizes = [size for size in micro_batch_sizes(changed, 0, devices // parallel.context)
                     if divides(changed, make_mesh(parallel, devices), size)]  # fmt: skip
            for remat in get_args(Remat):
                # Phases with the same layout and policy share a program.
                phases = tuple(with_settings(changed, 0, parallel, remat, size).phases[0] for size in sizes)
                programs = simulated_programs(dataclasses.replace(changed, phases=phases), devices, kernels)
                for index, size in enumerate(sizes):
                    estimate = estimate_phase(programs, index, hardware, table)
                    count += 1
                    if estimate.memory.total <= hardware.allocatable and decode.memory <= hardware.allocatable:
                        values = estimate.step_seconds, decode.step_seconds
                        fitting.append((values, shape, tuple(estimate.axes.values()), remat, size))
    return fitting, count


def divides(config, mesh, size):
    """Whether every stage of a ramp divides into micro-batches of a size."""
    phase, shards = single_phase(config, 0), batch_shards(mesh)
    batch = dataclasses.replace(phase.batch_for(phase.phases[0]), micro_batch=size)
    phase = dataclasses.replace(phase, phases=(dataclasses.replace(phase.phases[0], batch=batch),))
    return all(stage.sequences % (shards * micro_batch(phase, stage, shards)) == 0 for stage in stages(phase))


def front_of(candidates):
    """By the definition, in quadratic time."""
    values = {candidate[0] for candidate in candidates}
    best = {value for value in values if not any(dominates(other, value) for other in values)}
    return {candidate for candidate in candidates if candidate[0] in best}


def settings(point):
    training = point.training
    return point.values, point.config.model, tuple(training.axes.values()), training.remat, training.sequences


@pytest.mark.usefixtures("counted_at_once", "few_widths")
def test_the_search_finds_the_front_of_brute_force_with_fewer_estimates(monkeypatch):
    shapes = candidate_shapes(PLAIN.model, 0.1, (2, 8))[::6]
    fitting, count = brute_force(PLAIN, 2, DEVICE, shapes)
    assert count >= 250
    assert len(fitting) < 0.8 * count
    estimates = Counter()

    def counted(programs, phase, hardware, count):
        estimates["bounds" if count is least_activations else "counted"] += 1
        return estimate_phase(programs, phase, hardware, count)

    monkeypatch.setattr(settings_search, "estimate_phase", counted)
    front, own = search(PLAIN, 0, 2, DEVICE, shapes)
    assert len(front) > 1
    assert {settings(point) for point in front} == front_of(fitting)
    assert own.values == min(values for values, shape, *_ in fitting if shape == PLAIN.model)
    assert estimates["counted"] < count / 20


@pytest.mark.soak
@pytest.mark.parametrize(("devices", "least"), [(8, 500), (1024, 100)])  # of 1,024 devices each has few sequences
def test_the_front_of_the_8b_is_that_of_brute_force(devices, least):
    shapes = candidate_shapes(RELEASED.model, 0.05, (36, 44))
    fitting, count = brute_force(RELEASED, devices, HARDWARE["mi300x"], shapes)
    assert count >= least
    front, own = search(RELEASED, 0, devices, HARDWARE["mi300x"], shapes)
    assert {settings(point) for point in front} == front_of(fitting)
    assert own.values == min(values for values, shape, *_ in fitting if shape == RELEASED.model)


@pytest.mark.parametrize(("remat", "model", "parallel"), [
    ("none", {}, {}),
    ("full", {"router": "linear", "residual_scaling": False}, {"fsdp": 2}),
    ("dots", {"attention": "gqa", "router": "linear", "num_query_heads": 2, "hidden_size": 192, "expert_size": 256},
     {"context": 2, "context_attention": "ring"}),
    ("none", {"attention": "gqa", "router": "linear", "num_experts": 6},
     {"expert": 2, "expert_exchange": "ragged"}),
])  # fmt: skip
def test_activations_are_at_least_their_bound(remat, model, parallel):
    shape = dataclasses.replace(SMALL.model, num_layers=3, **model)
    layout = dataclasses.replace(SMALL.parallel, **parallel)
    config = with_settings(dataclasses.replace(SMALL, model=shape), 0, layout, remat, 1)
    program = simulated_programs(config, 2)[0]
    least = least_activations(program, 1, 1024)
    assert 0 < least.kept <= memory.residual_bytes(program, 1, 1024)


@pytest.mark.usefixtures("few_widths")
@pytest.mark.parametrize(("path", "band", "overrides"), [
    ("configs/zaya1_8b.yaml", 0.08, []),
    ("configs/tiny.yaml", 0.2, ["model.layer_pattern=[full, sliding]", "model.sliding_window=64", "model.attention=gqa",
                           "model.router=linear"]),
])  # fmt: skip
def test_shapes_follow_the_rule(path, band, overrides):
    model = load_config(path, overrides).model
    depths = model.num_layers // 2, 2 * model.num_layers
    shapes = candidate_shapes(model, band, depths)
    assert shapes[0] == model
    assert len(set(shapes)) == len(shapes) > 10
    step = 256 if model.hidden_size >= 1024 else 64
    for shape in shapes[1::3]:
        shape.check()
        assert shape.hidden_size % step == shape.expert_size % step == 0
        assert depths[0] <= shape.num_layers <= depths[1]
        for count in (total_parameters, active_parameters):
            assert count(shape) == pytest.approx(count(model), rel=band)
        deeper = dataclasses.replace(shape, num_layers=shape.num_layers + len(shape.layer_pattern))
        nearest = min(shape, deeper, key=lambda other: abs(total_parameters(other) - total_parameters(model)))
        assert nearest == shape


def test_decoding_takes_what_was_computed_by_hand():
    hardware = HARDWARE["mi300x"]
    single = estimate_decode(RELEASED.model, 4096, "bfloat16", hardware)
    # 753.6 M active parameters and the head's 262,272 · 2,048, in two bytes.
    assert single.parameters == 2 * (753_608_528 + 537_133_056)
    # 40,960 bytes a token, and a state of 2 · 1,280 + 128 values in each layer (docs/reference.md §1.1).
    assert single.cache == 40_960 * 4096 + 2 * 40 * (2 * 1280 + 128)
    assert single.memory == 2 * 8_840_488_784 + single.cache
    assert single.seconds["memory traffic"] == pytest.approx((2_581_483_168 + 167_987_200) / (0.9 * 5.3e12))
    assert single.seconds["kernel launches"] == pytest.approx(40 * 40 * 2e-6)
    assert single.step_seconds == sum(single.seconds.values())


def test_decoding_reads_no_more_than_a_window_and_the_experts_there_are():
    model = load_config("configs/zaya1_74b.yaml").model
    long = estimate_decode(model, 131072, "bfloat16", H200)
    # 30 full layers, and 30 that keep 4,097 tokens: keys and values of 256 each; a state of 2 · 2,304 + 128.
    assert long.cache == 2 * (30 * (131072 + 4097) * 512 + 60 * (2 * 2304 + 128))
    dense = dataclasses.replace(SMALL.model, num_experts=1)
    assert estimate_decode(dense, 64, "bfloat16", H200).parameters == 2 * total_parameters(dense)


@pytest.mark.usefixtures("counted_at_once", "few_widths")
def test_the_command_writes_points_that_their_overrides_make(tmp_path, capsys):
    output, png = tmp_path / "front.json", tmp_path / "front.png"
    changes = [*TINY, "train.batch.tokens=256", "model.attention=gqa", "model.router=linear"]
    arguments = ["configs/tiny.yaml", *changes, "--devices", "2", "--hardware", "h200", "--suggest", "--band", "5",
                 "--output", str(output), "--png", str(png)]  # fmt: skip
    assert main(["sizing", *arguments]) == 0
    result, printed = json.loads(output.read_text()), capsys.readouterr().out
    assert (result["phase"], result["context"], result["layers"]) == ("train", 64, [2, 8])
    assert png.stat().st_size > 1000
    for row in [*result["front"], result["configuration"]]:
        config = load_config("configs/tiny.yaml", [*changes, *row["overrides"]])
        assert {size: getattr(config.model, size) for size in row["model"]} == row["model"]
        estimate = estimate_phase(simulated_programs(config, 2), 0, get_device("h200", 2), ActivationTable())
        assert estimate.seconds == row["training"]["seconds"]
        assert estimate.seconds["kernel launches"] > 0.5 * estimate.step_seconds  # also of a device that was measured
        assert estimate.memory.total == row["training"]["bytes"]
        assert row["tokens_per_second"] == pytest.approx(256 / estimate.step_seconds)
        assert "FAIL size of the experts' products" in row["rules"]
    assert f"dominated by point {result['dominated_by']}, which trains" in printed
    best, own = result["front"][result["dominated_by"] - 1], result["configuration"]
    assert best["tokens_per_second"] >= own["tokens_per_second"]
    assert best["seconds_per_token"] <= own["seconds_per_token"]
    assert "sizing rules broken: " in printed


def test_a_configuration_on_the_front_and_one_that_does_not_fit_are_named():
    sizes = dict.fromkeys(("hidden_size", "expert_size", "num_query_heads", "num_experts", "num_layers"), 4)
    row = {"overrides": [], "model": sizes, "total_parameters": 1e9, "active_parameters": 1e8, "rules": [],
           "tokens_per_second": 1234.5, "training": {"bytes": 1e9}, "seconds_per_token": 0.001}  # fmt: skip
    result = {"phase": "train", "context": 64, "parameter_band": 0.05, "layers": (2, 8), "shapes": 3, "front": [row],
              "configuration": row, "dominated_by": None}  # fmt: skip
    assert "The configuration's own widths are on the front: point 1." in shapes_module.lines(result, 1, "h200")
    absent = shapes_module.lines(result | {"configuration": None}, 1, "h200")
    assert "The configuration's own widths are estimated not to fit." in absent


def test_larger_micro_batches_are_tried_after_one_that_a_ramp_does_not_allow(monkeypatch):
    """Four devices have 1, 2, 3 and 4 sequences each; three do not divide into twos, but are one micro-batch of 4."""
    monkeypatch.setattr(settings_search, "residual_bytes", lambda *_: 10**6)
    share_states(monkeypatch)
    ramp = ["train.batch.tokens=4096", "train.batch.start=1024", "train.batch.ramp_tokens=100_000", "data.context=256"]
    plain = ["model.num_experts=1", "model.attention=gqa", "model.router=linear"]
    config = load_config("configs/tiny.yaml", [*TINY, *ramp, *plain])
    assert {point.estimate.sequences for point in suggest(config, 0, 4, H200, 100)} == {1, 4}


@pytest.mark.parametrize(("arguments", "message"), [
    ("--suggest --phase last", "--phase is 'last', but must be one of train."),
    ("--suggest --band 0", "--band is 0.0, but must be above 0 and at most 100."),
    ("--suggest --band nan", "--band is .nan, but must be above 0 and at most 100."),
    ("--suggest --layers 4 3", "--layers is '4 3', but must be LOW, at least 1, and HIGH, at least LOW."),
    ("init_from=runs/x --suggest", "those of init_from=runs/x are fixed: set init_from=null."),
    ("--suggest --png /nowhere/x.png", "--png is '/nowhere/x.png', but must be a file in an existing folder."),
    ("--band 5", "--band needs --suggest."),
    ("--layers 2 4", "--layers needs --suggest."),
    ("--suggest --devices 3 --band 0.001", "use more devices, or a smaller batch"),
])  # fmt: skip
@pytest.mark.usefixtures("few_widths")
def test_bad_input_is_named(arguments, message, capsys):
    assert main(["sizing", "configs/tiny.yaml", *arguments.split()]) == 2
    assert message in capsys.readouterr().err
