"""Where a step's time goes: attribution of intervals, and a trace of a real run on eight devices."""

import contextlib
import functools
import io
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.devices_helpers import ROOT, on_devices
from tests.hardware.test_measurements import COLLECTIVES, GEMM, MEMORY, fit, write
from tests.lab.helpers import empty_state
from tests.train_helpers import fast_jit, write_run
from zaya_jax.config import load_config
from zaya_jax.config.stages import largest_stage
from zaya_jax.errors import InputError
from zaya_jax.evaluate import heldout
from zaya_jax.generate import steps
from zaya_jax.generate.steps import BLOCK
from zaya_jax.lab.measure.step_parts import check_largest_batch, trace_rows
from zaya_jax.lab.measure.step_trace import Interval, Trace, attribute
from zaya_jax.lab.predict.dry_run import memory
from zaya_jax.machine.__main__ import main
from zaya_jax.ops.parts import OTHER, PARTS
from zaya_jax.train import fit as training
from zaya_jax.train import initialization, trainer
from zaya_jax.train.program import PhaseProgram
from zaya_jax.train.trainer import Trainer

SECOND = 10**9
intervals = st.lists(
    st.builds(
        lambda start, length, part, opcode: Interval(start, start + length, part, opcode),
        st.integers(0, 50), st.integers(0, 20), st.sampled_from(["experts", "loss"]),
        st.sampled_from(["fusion", "all-gather-start"]),
    ),
    max_size=12,
)  # fmt: skip


def moments(operations, start, end):
    """For each ns, the parts that run and whether a collective does."""
    for now in range(start, end):
        running = [interval for interval in operations if interval.start <= now < interval.end]
        yield [x.part for x in running if not x.is_collective], any(x.is_collective for x in running)


@given(operations=intervals)
def test_every_moment_counts_once(operations):
    timeline = attribute(operations)
    start, end = min((x.start for x in operations), default=0), max((x.end for x in operations), default=0)
    parts, exposed, overlapped = dict.fromkeys(timeline.parts, 0.0), 0, 0
    for running, communicates in moments(operations, start, end):
        for part in running:
            parts[part] += 1 / len(running)
        exposed += communicates and not running
        overlapped += communicates and bool(running)
    assert timeline.parts == pytest.approx({part: count / SECOND for part, count in parts.items()}, abs=1e-15)
    assert (timeline.exposed, timeline.overlapped) == pytest.approx((exposed / SECOND, overlapped / SECOND), abs=1e-15)


def test_overlap_is_a_share_of_the_time_of_collectives():
    compute, gather = Interval(0, 6 * SECOND, "experts"), Interval(4 * SECOND, 12 * SECOND, OTHER, "all-reduce")
    assert attribute([compute, gather]).overlap == 2 / 8
    assert attribute([compute]).overlap is None


@pytest.mark.parametrize(("other", "named", "warned"), [
    (0.04, 0.95, None), (0.06, 0.94, "6.0 % of the time is in no part. 6.0 % is other"),
    (0.0, 0.93, "7.0 % of the time is in no part. 0.0 % is other"),
])  # fmt: skip
def test_more_than_a_twentieth_of_a_step_in_no_part_is_a_warning(other, named, warned):
    ends = other * SECOND, (other + named) * SECOND
    seen = [Interval(0, ends[0], OTHER), Interval(*ends, "experts")]
    rows = trace_rows(Trace(seen, None, 0, 1, 1.0, "cpu", 1), None)
    assert len(rows["warnings"]) == (warned is not None)
    assert all(warned in warning and "--instructions 20" in warning for warning in rows["warnings"])


# One step longer than up to the save after step 5, where the window ends early.
OVERRIDES = ["profile.start=4", "profile.steps=9", 'phases=[{"tokens": 1536}]', "sample.tokens=0",
             "train.batch.tokens=256", "model.attention=gqa", "model.router=linear",
             "optimizer.matrices=adamw"]  # fmt: skip


def traced(folder):
    """Train with a traced window, and trace a step of the same configuration.

    Returns:
      What both say, and for each step of the run the parameters from before it that are still in memory.
    """
    path, said, kept, step = write_run(Path(folder)), io.StringIO(), [], Trainer.step
    compiled = functools.cache(PhaseProgram.compile)
    programs = []

    def compile_step(program, stage):  # once: both have the same
        programs.append(program)
        return compiled(programs[0], stage)

    def watched_step(trainer):
        before = trainer.state.params
        step(trainer)
        kept.append([name for name, x in before.items() if not x.is_deleted()])

    links = [fit("all_gather", 8, 1e-4, 1e9), fit("all_reduce", 8, 1e-4, 1e9)]
    measured = write(Path(folder, "measured"), gemm=GEMM, memory=MEMORY, collectives=COLLECTIVES | {"fits": links})
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
        # These take seconds, and times do not depend on values.
        patch.setattr(initialization, "init_state", empty_state)
        patch.setattr(trainer, "plot_run", lambda *_, **__: None)
        patch.setattr(heldout, "heldout_loss", lambda *_: heldout.HeldoutLoss(1.0, 1))
        patch.setattr(memory, "residual_bytes", lambda *_: 10**6)
        patch.setattr(Trainer, "step", watched_step)
        patch.setattr(PhaseProgram, "compile", compile_step)
        training.run_training(load_config(path, OVERRIDES))
        more = ["--steps", "1", "--hardware", measured, "--output", f"{folder}/step.json"]
        assert main(["step", str(path), *OVERRIDES, *more]) == 0
    return said.getvalue(), kept


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """The folder of `traced` on eight devices, and what it returned."""
    folder = tmp_path_factory.mktemp("traced")
    return folder, *on_devices(8, "tests.lab.test_step_parts:traced", str(folder))


@pytest.fixture
def run(said):
    """The folder of a run on eight devices, of whose steps two are traced."""
    folder, *_ = said
    return folder / "run"


def test_a_traced_run_is_broken_down_by_part(said, run, tmp_path, capsys):
    assert f"Traced steps 4 to 5 into {run / 'profile'}" in said[1]
    output, png = tmp_path / "step.json", tmp_path / "step.png"
    assert main(["step", str(run), "--instructions", "3", "--output", str(output), "--png", str(png)]) == 0
    result = json.loads(output.read_text())
    assert result["steps"] == 2
    assert result["hardware"]["device"] == "cpu"
    assert set(result["parts"]) <= {*PARTS, OTHER}
    assert {"attention", "experts", "loss", "optimizer", "router"} <= set(result["parts"])
    measured = sum(row["measured"] for row in result["parts"].values())
    total = measured + result["exposed_collectives"] + result["unattributed"]
    assert total == pytest.approx(result["seconds"], abs=1e-4)
    assert 0 < measured < result["seconds"]
    assert result["exposed_collectives"] > 0
    assert 0 <= result["overlap"] <= 1
    assert png.read_bytes()[:4] == b"\x89PNG"
    printed = capsys.readouterr().out
    assert "unattributed" in printed
    times = [row["ms"] for row in result["instructions"]]
    assert len(times) == 3
    assert times == sorted(times, reverse=True)
    assert all(row["instruction"] in printed and row["part"] in {*PARTS, OTHER} for row in result["instructions"])
    (listed,) = re.findall(r"^time \(ms\) +calls +part +opcode +instruction$", printed, re.MULTILINE)
    assert listed
    assert "Not predicted: There is no data sheet of the device (cpu)." in printed


def test_a_step_donates_the_parameters_that_it_replaces(said):
    """Only runs that compile as users' do can say so: `compile_once` donates nothing."""
    *_, kept = said
    assert len(kept) == 6
    assert kept[:5] == [[]] * 5  # those from before step 6 are saved meanwhile, by a CPU from where they lie


def test_a_configuration_is_traced_here_and_set_beside_the_estimate(said):
    folder, printed, _ = said
    result = json.loads((folder / "step.json").read_text())
    assert result["steps"] == 1
    assert result["untraced_seconds"] > 0
    assert result["estimated_seconds"] > 1  # at 1,000 FLOP/s
    assert re.search(r"The dry run estimates [\d,.]+ ms, \+[\d,]+% against the measurement.", printed)


def test_a_prompt_and_a_decode_step_are_broken_down(monkeypatch, tmp_path, capsys):
    config, output, png = write_run(tmp_path), tmp_path / "step.json", tmp_path / "step.png"
    step = ["step", str(config), "model.max_positions=512", "model.num_layers=1"]
    assert main([*step, "--work", "decode", "--prompt", "4096"]) == 2
    assert "4096 tokens of prompts, rounded up to whole chunks, and 144 new ones exceed" in capsys.readouterr().err
    monkeypatch.setattr(steps, "_jit", fast_jit)
    arguments = [*step, "--batch", "2", "--prompt", "70", "--steps", "2"]
    for work, count in (("prefill", 2), ("decode", 2 * BLOCK)):
        assert main([*arguments, "--work", work, "--output", str(output), "--png", str(png)]) == 0
        result = json.loads(output.read_text())
        assert (result["steps"], result["benchmark"].split()[0]) == (count, work)
        assert "2 × 70 tokens" in result["size"]
        assert {"attention", "cca_mix", "experts", "router", "loss"} <= set(result["parts"]) <= {*PARTS, OTHER}
        measured = sum(row["measured"] for row in result["parts"].values())
        assert measured + result["unattributed"] == pytest.approx(result["seconds"], abs=1e-4)
        assert png.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(("arguments", "message"), [
    (["configs/tiny.yaml", "--batch", "2"], "--batch is 2, but must be at least 1, and needs --work prefill or"),
    (["configs/tiny.yaml", "--work", "decode", "--prompt", "0"], "--prompt is 0, but must be at least 1"),
    (["configs/tiny.yaml", "--work", "prefill", "--hardware", "h200"], "--hardware is for --work train"),
    (["{run}", "--work", "prefill"], "is a run, whose trace is of training: give a configuration file"),
    (["{empty}"], "config.yaml"),
    (["{run}", "seed=1"], "is a run, whose configuration is fixed: leave out seed=1."),
    (["configs/tiny.yaml", "lora.rank=2", "lora.alpha=2", "init_from=hf:x"], "lora must be null"),
    (["configs/tiny.yaml", "--steps", "0"], "--steps is 0, but must be at least 1."),
    (["configs/tiny.yaml", "--instructions", "-1"], "--instructions is -1, but must be at least 0."),
    (["no.yaml"], "no.yaml"),
])  # fmt: skip
def test_bad_input_is_named(arguments, message, run, tmp_path, capsys):
    assert main(["step", *(x.format(empty=tmp_path, run=run) for x in arguments)]) == 2
    assert message in capsys.readouterr().err


def test_an_estimate_is_of_the_batch_that_was_traced():
    config = load_config(ROOT / "configs/recipe_tiny.yaml")
    largest = largest_stage(config, 0)
    check_largest_batch(config, largest.first_step + 1)
    with pytest.raises(InputError, match=rf"estimates steps of {largest.sequences} sequences, but step 1 has 8:"):
        check_largest_batch(config, 1)


def test_a_run_without_a_trace_says_how_to_get_one(run, tmp_path, capsys):
    (tmp_path / "config.yaml").write_bytes((run / "config.yaml").read_bytes())
    assert main(["step", str(tmp_path)]) == 2
    assert "contains no finished trace. Set profile.start to a step" in capsys.readouterr().err
