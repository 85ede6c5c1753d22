"""Runs of several phases: where they go on, what may change in them, where they may begin."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.train.test_fit import refused
from tests.train.test_interruption import metric_rows, train_until
from tests.train_helpers import (
    PLAIN,
    change,
    compile_once,
    compute_little,
    differing,
    on_devices,
    restore,
    small_run,
    trained,
)
from zaya_jax.config import (
    BatchConfig,
    LoraConfig,
    ParallelConfig,
    PhaseConfig,
    ScheduleConfig,
    SpikeConfig,
    load_config,
)
from zaya_jax.config.stages import phase_steps, stages, total_steps
from zaya_jax.errors import InputError
from zaya_jax.parallel.batch import WHOLE
from zaya_jax.parallel.placement import Placement
from zaya_jax.run.checkpoints import saved_steps
from zaya_jax.train.fit import run_training
from zaya_jax.train.run_checks import check_past
from zaya_jax.train.trainer import Trainer

PHASES = (
    PhaseConfig(768, "one", schedule=ScheduleConfig(warmup_tokens=128),
                batch=BatchConfig(tokens=256, start=128, ramp_tokens=512, micro_batch=2)),
    PhaseConfig(512, "two", context=64, rope_base=1.0e3, packing="bins", remat="dots",
                batch=BatchConfig(tokens=256, micro_batch=2)),
    # Its step is that of the first phase's small batches, and so need not be compiled.
    PhaseConfig(512, "three", schedule=ScheduleConfig("wsd", 0.5, 0.1, decay_tokens=256)),
)  # fmt: skip


def phased(folder, run="run", **changes):
    config = small_run(folder, run=run)
    model = dataclasses.replace(config.model, **PLAIN)
    return change(config, {"model": model, "phases": PHASES, "checkpoint.every": 3, "checkpoint.keep": 1, **changes})


def altered(config, index, **changes):
    """`config` with other values in one of its phases."""
    phases = list(config.phases)
    phases[index] = dataclasses.replace(phases[index], **changes)
    return change(config, {"phases": tuple(phases)})


@pytest.fixture(scope="module")
def phase_run(tmp_path_factory):
    """Configuration, result, and the shape of each batch that was trained on."""
    config = phased(tmp_path_factory.mktemp("phases"))
    shapes = []
    place = Placement.place

    def record_shape(placement, batch, count=None, share=WHOLE):
        if count is not None:
            shapes.append((count, *batch["tokens"].shape))
        return place(placement, batch, count, share)

    with pytest.MonkeyPatch.context() as patch:
        compute_little(patch)
        patch.setattr(Placement, "place", record_shape)
        return config, run_training(config), shapes


@pytest.fixture(scope="module")
def computed(tmp_path_factory):
    """Configuration and result of a run whose steps are those of training."""
    return trained(phased(tmp_path_factory.mktemp("computed")))


@pytest.fixture(autouse=True)
def _steps(request, monkeypatch):
    """Those of training take half a minute to compile."""
    (compile_once if request.node.get_closest_marker("soak") else compute_little)(monkeypatch)


def test_the_run_moves_through_its_phases_by_itself(phase_run):
    config, result, _ = phase_run
    rows = metric_rows(result.run_dir)
    assert phase_steps(config) == [(0, 4), (4, 6), (6, 10)]
    assert [row["phase"] for row in rows] == ["one"] * 4 + ["two"] * 2 + ["three"] * 4
    assert result.model.config.rope_base == config.model.rope_base


def test_steps_have_the_tokens_of_the_schedule_exactly(phase_run):
    config, result, shapes = phase_run
    planned = [(stage.sequences, stage.context) for stage in stages(config) for _ in range(stage.steps)]
    assert [shape[1:] for shape in shapes] == planned
    assert [shape[0] for shape in shapes] == [sequences // 2 for sequences, _ in planned]
    assert sorted({sequences for sequences, context in planned[:4]}) == [4, 8]  # a ramp, so that this says something
    seen = [row["tokens_seen"] for row in metric_rows(result.run_dir)]
    assert [b - a for a, b in zip([0, *seen], seen, strict=False)] == [a * b for a, b in planned]


def test_each_boundary_is_a_named_checkpoint_that_stays(phase_run):
    _, result, _ = phase_run
    assert json.loads((result.run_dir / "phases.json").read_text()) == {"one": 4, "two": 6, "three": 10}
    assert saved_steps(result.run_dir / "checkpoints") == [4, 6, 10]


@pytest.mark.parametrize("step", [4, 6, *(pytest.param(step, marks=pytest.mark.soak) for step in (3, 5, 7, 8))])
def test_interrupted_around_a_boundary_it_goes_on_bitwise(request, tmp_path, step):
    soak = request.node.get_closest_marker("soak")
    config, result, *_ = request.getfixturevalue("computed" if soak else "phase_run")
    config = change(config, {"run_dir": str(tmp_path / "run")})
    train_until(config, step)
    again = run_training(config)
    assert (again.run_dir / "metrics.jsonl").read_bytes() == (result.run_dir / "metrics.jsonl").read_bytes()
    assert not differing(again.state, result.state)
    assert again.heldout == result.heldout
    assert (again.run_dir / "phases.json").read_bytes() == (result.run_dir / "phases.json").read_bytes()


def losses_on_devices(folder):
    """Of each step of the phases, on the devices of this process."""
    return [row["loss"] for row in metric_rows(trained(phased(Path(folder)))[1].run_dir)]


@pytest.mark.soak
def test_two_devices_go_through_ramp_and_phases_alike(computed, tmp_path):
    losses = on_devices(2, "tests.train.test_phases:losses_on_devices", str(tmp_path))
    alone = [row["loss"] for row in metric_rows(computed[1].run_dir)]
    assert losses != alone
    assert losses == pytest.approx(alone, rel=1e-2)


def adapters_in_two_layouts(folder, init_from):
    """After each step on the devices of this process: arrays of the shape of a parameter of the base, and its spec."""
    parallel = ParallelConfig(), ParallelConfig(fsdp=2)
    phases = tuple(PhaseConfig(256, f"fsdp_{layout.fsdp}", parallel=layout) for layout in parallel)
    changes = {"phases": phases, "lora": LoraConfig(rank=2, alpha=4.0), "init_from": init_from,
               "train.batch": BatchConfig(tokens=256), "evaluation.batch_size": 8}  # fmt: skip
    after, step = [], Trainer.step

    def record(trainer):
        step(trainer)
        experts = trainer.base["blocks.0.mixture.experts.gate_up"]
        alive = [x for x in jax.live_arrays() if x.shape == experts.shape]
        after.append((len(alive), str(experts.sharding)))

    with pytest.MonkeyPatch.context() as patch:
        compute_little(patch)
        patch.setattr(Trainer, "step", record)
        run_training(phased(Path(folder), **changes))
    return after


def test_the_base_of_adapters_is_there_once_in_a_phase_of_another_layout(phase_run, tmp_path):
    after = on_devices(8, "tests.train.test_phases:adapters_in_two_layouts", str(tmp_path), str(phase_run[1].run_dir))
    assert [count for count, _ in after] == [1, 1]
    assert len({sharding for _, sharding in after}) == 2


# --- what may change -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def started_run(phase_run, tmp_path_factory):
    """A run in the midst of phase two, its checkpoint of step 5; read only."""
    run = tmp_path_factory.mktemp("begun") / "run"
    config = change(phase_run[0], {"run_dir": str(run), "checkpoint.every": 5})
    with pytest.MonkeyPatch.context() as patch:
        compute_little(patch)
        train_until(config, 6)
    return config


@pytest.mark.soak
def test_phases_to_come_may_change(started_run, tmp_path):
    shutil.copytree(started_run.run_dir, tmp_path / "run")
    other = change(started_run, {"run_dir": str(tmp_path / "run")})
    other = altered(other, 2, tokens=256, context=64, schedule=ScheduleConfig("constant", 0.2))
    result = run_training(other)
    assert int(result.state.step) == total_steps(other) == 8
    assert load_config(result.run_dir / "config.yaml").phases == other.phases
    assert metric_rows(result.run_dir)[-1]["learning_rate"] == pytest.approx(0.2 * other.optimizer.muon.learning_rate)


@pytest.mark.parametrize(
    ("index", "changes", "match"),
    [
        (0, {"tokens": 1024}, r"^phases\.one\.tokens was 768 and is now 1024, but the run has started that phase"),
        (0, {"name": "first"}, r"^phases\.one\.name was 'one' and is now 'first'"),
        (1, {"rope_base": 2.0e3}, r"^phases\.two\.rope_base was 1000\.0 and is now 2000\.0"),
        (
            1,
            {"schedule": ScheduleConfig()},
            r"^phases\.one: the cosine schedule spanned 1,280 tokens and now spans 768\.",
        ),
        (1, {"batch": None}, r"^phases\.two\.batch was "),
        (2, {"schedule": None}, r"^phases\.one: the cosine schedule spanned 1,280 tokens and now spans 1,792\."),
        (1, {"tokens": 768}, r"spanned 1,280 tokens and now spans 1,536\. .*start anew in another run_dir\.$"),
    ],
)
def test_phases_that_are_begun_may_not(started_run, index, changes, match):
    with pytest.raises(InputError, match=match):
        check_past(started_run, altered(started_run, index, **changes), 5)


def test_a_phase_that_is_begun_may_not_go(started_run):
    refused(change(started_run, {"phases": PHASES[:1]}), r"^phases\.two was removed, but the run has started")


# --- where a run may begin -------------------------------------------------------------------------------------


def test_a_run_begins_where_another_ended_a_phase(phase_run, tmp_path):
    config, result, _ = phase_run
    changes = {"run_dir": str(tmp_path / "run"), "init_from": f"{result.run_dir}@one", "start_phase": "two"}
    later = run_training(change(config, changes))
    assert metric_rows(later.run_dir) == metric_rows(result.run_dir)[4:]
    assert not differing(later.state, result.state)


def test_a_later_phase_can_be_begun_from_nothing(phase_run, tmp_path):
    config, result, _ = phase_run
    later = run_training(change(config, {"run_dir": str(tmp_path / "run"), "start_phase": "three"}))
    rows = metric_rows(later.run_dir)
    assert [row["step"] for row in rows] == [7, 8, 9, 10]
    assert rows[0]["tokens"] == metric_rows(result.run_dir)[6]["tokens"]  # the same batch
    assert rows[0]["loss"] > metric_rows(result.run_dir)[6]["loss"]


@pytest.mark.soak
@pytest.mark.parametrize("form", ["{}", "{}/checkpoints/6", "{}@two"])
def test_a_run_begins_with_another_ones_state(phase_run, tmp_path, form):
    config, result, _ = phase_run
    phase = PhaseConfig(
        128, "more", batch=BatchConfig(tokens=128, micro_batch=2), schedule=ScheduleConfig("constant", 1e-9)
    )
    name = form.format(result.run_dir)
    later = run_training(change(config, {"run_dir": str(tmp_path / "run"), "phases": (phase,), "init_from": name}))
    assert int(later.state.step) == 1
    theirs = result.state if form == "{}" else restore(config, 6)[0]
    for name, x in theirs.params.items():  # at a rate of next to nothing it stays where it began
        np.testing.assert_allclose(later.state.params[name], x, atol=1e-9, err_msg=name)
    assert differing(later.state.opt_state, theirs.opt_state)  # while moments have moved on


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("{}@four", r"init_from is .*@four', but the finished phases of .* are: one, two, three\."),
        ("{}/nothing@one", r"but .*/nothing does not exist"),
        ("{}/nothing", r"init_from is .*, which does not exist"),
    ],
)
def test_a_beginning_that_is_not_there_is_refused_before_a_run_is_claimed(phase_run, tmp_path, name, match):
    config, result, _ = phase_run
    bad = change(config, {"run_dir": str(tmp_path / "run"), "init_from": name.format(result.run_dir)})
    with pytest.raises(InputError, match=match):
        run_training(bad)
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_a_run_goes_on_though_the_one_it_began_with_is_gone(phase_run, tmp_path):
    config, result, _ = phase_run
    shutil.copytree(result.run_dir, tmp_path / "source")
    changes = {"run_dir": str(tmp_path / "run"), "init_from": f"{tmp_path / 'source'}@one", "start_phase": "two"}
    later = change(config, changes)
    train_until(later, 8)
    shutil.rmtree(tmp_path / "source")
    assert not differing(run_training(later).state, result.state)


@pytest.mark.soak
def test_a_longer_context_begins_with_the_state_of_a_shorter_one(phase_run, tmp_path):
    config, result, _ = phase_run
    phase = PhaseConfig(256, "long", context=128, batch=BatchConfig(tokens=256, micro_batch=2))
    changes = {"run_dir": str(tmp_path / "run"), "init_from": str(result.run_dir), "model.max_positions": 128}
    assert int(run_training(change(config, {**changes, "phases": (phase,)})).state.step) == 1


@pytest.mark.soak
@pytest.mark.parametrize("step", [4, 6, 9])
def test_skipped_steps_are_skipped_again_when_a_run_goes_on(spiky, tmp_path, step):
    config, result = spiky
    skips = [row.get("skip") for row in metric_rows(result.run_dir)]
    assert "gradient spike" in skips  # each in its phase, the ramp among them, so that the next line says something
    assert None in skips
    config = change(config, {"run_dir": str(tmp_path / "run")})
    train_until(config, step)
    again = run_training(config)
    assert (again.run_dir / "metrics.jsonl").read_bytes() == (result.run_dir / "metrics.jsonl").read_bytes()
    assert not differing(again.state, result.state)


@pytest.fixture(scope="module")
def spiky(phase_run, tmp_path_factory):
    """A run that takes every loss a little above the one before for a spike."""
    folder = tmp_path_factory.mktemp("spiky")
    return trained(change(phase_run[0], {"run_dir": str(folder / "run"), "train.spike": SpikeConfig(1, 1e-3)}))
