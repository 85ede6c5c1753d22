"""Rows are written once each, in order, a step late, to every sink; the console is one."""

import os
import sys
from itertools import pairwise
from types import SimpleNamespace

import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.train_helpers import CONFIG, change
from zaya_jax.config import PhaseConfig, SourceConfig, Table
from zaya_jax.errors import Reason, RunStopped
from zaya_jax.train import step_logger as module
from zaya_jax.train.sinks import console
from zaya_jax.train.sinks.console import ConsoleReport, _clock
from zaya_jax.train.step_logger import StepLogger


class Rows:
    """A sink that keeps the rows it is given."""

    def __init__(self):
        self.metrics, self.timings = [], []

    def write(self, metrics, timings):
        self.metrics.append(metrics)
        self.timings.append(timings)


def metrics(skip=0, skipped=0, **more):
    return {"loss": jnp.float32(2.5), "grad_norm": jnp.float32(1), "tokens": jnp.float32(100), "skip": jnp.int32(skip),
            "skipped": jnp.int32(skipped), "expert_counts": jnp.array([[3, 4]]),
            "grad_norm_by_role": {"router": jnp.float32(1)}, "update_norm_by_role": {"router": jnp.float32(2)},
            **more}  # fmt: skip


DETAILS = {"expert_counts": [[3, 4]], "grad_norm_by_role": {"router": 1.0}, "update_norm_by_role": {"router": 2.0}}


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until it is moved; of the throughput it leaves the tokens."""
    now = [50.0]
    monkeypatch.setattr(
        module, "throughput", lambda config, step, tokens, seconds, *devices: {"speed": tokens / max(seconds, 1e-9)}
    )
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def logger(clock):
    config = change(CONFIG, {"train.max_skipped_steps": 3, "train.log_every": 2})
    return StepLogger(config, [rows := Rows(), Rows()]), rows


def test_a_step_is_recorded_when_the_next_one_runs(logger):
    logger, rows = logger
    for step in (1, 2, 3):
        logger.start_step(step, metrics(), 0.0)
        assert [row["step"] for row in rows.metrics] == list(range(1, step))
    logger.record({"score": 2.0, "parts": {"a": 1}})
    logger.record()
    usual = {"phase": "train", "loss": 2.5, "grad_norm": 1, "tokens": 100, "skipped": 0}
    assert rows.metrics == [
        {"step": 1, "tokens_seen": 256, **usual},
        {"step": 2, "tokens_seen": 512, **usual, "loss_by_source": {"corpus": 2.5}, **DETAILS},
        {"step": 3, "tokens_seen": 768, **usual, "score": 2.0, "parts": {"a": 1}},
    ]


def test_evaluation_and_saving_are_no_part_of_a_steps_time(logger, clock):
    logger, rows = logger
    clock[0] += 30  # compilation
    logger.restart_clock()
    clock[0] += 1  # data and dispatch of the first step
    logger.start_step(1, metrics(), 0.25)
    clock[0] += 3
    logger.start_step(2, metrics(), 0.5)
    clock[0] += 2
    logger.wait()
    clock[0] += 100  # evaluation
    logger.record({"score": 1.0})
    clock[0] += 100  # saving
    logger.restart_clock()
    clock[0] += 5
    logger.start_step(3, metrics(), 0.0)
    logger.record()
    assert rows.timings == [
        {"step": 1, "seconds": 4, "data_wait": 0.25, "speed": 25},
        {"step": 2, "seconds": 2, "data_wait": 0.5, "speed": 50},
        {"step": 3, "seconds": 5, "data_wait": 0.0, "speed": 20},
    ]


def test_the_loss_of_each_source_that_was_read_is_a_mean_over_its_tokens():
    config = change(CONFIG, {"data.sources": Table({name: SourceConfig(name) for name in "abc"}), "train.log_every": 1})
    logger = StepLogger(config, [rows := Rows()])
    logger.start_step(1, metrics(source_loss=jnp.array([6.0, 0.0, 5.0]), source_tokens=jnp.array([3.0, 0.0, 2.0])), 0.0)
    logger.record()
    assert rows.metrics[0]["loss_by_source"] == {"a": 2.0, "c": 2.5}
    assert not {"source_loss", "source_tokens"} & rows.metrics[0].keys()


def test_a_skipped_step_is_recorded_with_its_rows_and_many_end_the_run(logger):
    logger, rows = logger
    for step, skip in ((1, 2), (2, 3)):
        logger.start_step(step, metrics(skip, step), 0.0)
    logger.start_step(3, metrics(1, 3), 0.0)
    with pytest.raises(
        RunStopped, match=r"skipped steps in a row .* at step 3 \(.*: not finite\).*resume_from="
    ) as end:
        logger.record()
    assert "train.spike" not in str(end.value)
    assert end.value.reason is Reason.NOT_FINITE
    assert [(row["skip"], row["rows"]) for row in rows.metrics] == [
        ("loss spike", [0, 8]), ("gradient spike", [8, 16]), ("not finite", [16, 24]),
    ]  # fmt: skip


def test_a_run_that_spikes_ended_is_told_which_settings_to_change(logger):
    logger, _ = logger
    logger.start_step(7, metrics(2, 3), 0.0)
    with pytest.raises(RunStopped, match=r"at step 7 \(.*: loss spike\)") as end:
        logger.record()
    for key in ("train.spike.threshold", "train.max_skipped_steps above train.spike.window=128", "resume_from="):
        assert key in str(end.value)
    assert end.value.reason is Reason.SPIKE


def test_the_rows_of_a_skipped_step_are_those_of_the_data(clock):
    config = change(CONFIG, {"data.skip_rows": ((4, 5), (16, 30), (38, 40))})
    logger = StepLogger(config, [rows := Rows()])
    for step in (1, 2, 3, 4):
        logger.start_step(step, metrics(1, 1), 0.0)
    logger.record()
    assert [row["rows"] for row in rows.metrics] == [[0, 9], [9, 31], [31, 41], [41, 49]]


# --- the console -----------------------------------------------------------------------------------------------


PHASES = PhaseConfig(10 * 256), PhaseConfig(2 * 256, "long", context=64)


def make(log_every=5, evaluators=(), phases=PHASES, run_dir="runs/run"):
    """A console of 12 steps of 256 tokens."""
    config = change(CONFIG, {"phases": phases, "train.log_every": log_every, "run_dir": run_dir})
    plan = SimpleNamespace(phases=[SimpleNamespace(bytes_per_token=4.0)] * 2)
    return ConsoleReport(config, plan, "cpu", evaluators)


def row(step, **changes):
    return {"step": step, "phase": "train", "loss": 2.772588722239781, "tokens": 100.0, "load_entropy": [0.5, 1.0],
            "skipped": 0, **changes}  # fmt: skip


def timings(seconds=0.5, tokens=100.0, flops=2e6, mfu=None):
    speed = tokens / max(seconds, 1e-9)
    return {"seconds": seconds, "tokens_per_second": speed, "flops_per_second": flops * speed, "mfu": mfu}


@pytest.fixture
def write(monkeypatch):
    """Report a step that took `seconds` of a clock, after a `pause` for evaluations and saves."""
    now = [50.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])

    def write(report, step, seconds=0.5, tokens=100.0, *, pause=0.0, **changes):
        now[0] += pause + seconds
        report.write(row(step, **changes), timings(seconds, tokens))

    return write


def test_a_line_every_few_steps_and_one_at_the_end(capsys, write):
    report = make()
    for step in range(1, 13):
        write(report, step)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in lines] == ["step 5/12", "step 10/12", "step 12/12"]
    assert lines[0] == (
        "step 5/12 | loss 2.773 | 1.000 bits/byte | 200 tokens/s | 0.4 GFLOP/s | load entropy 0.750 | ETA 0:04"
    )
    assert lines[2].endswith("| ETA 0:00")


@pytest.mark.parametrize(
    ("seconds", "minutes", "offered", "run_dir"),
    [
        (0.1, 0, 0, "runs/run"),
        (15, 0, 0, "runs/run"),
        (30, 3, 0, "runs/run"),
        (120, 12, 2, "runs/run/"),
        (150, 15, 1, "runs/run"),
        (150, 15, 0, "runs/run_short/"),
    ],
)
def test_after_a_few_steps_the_console_says_how_long_the_run_takes_and_offers_a_shorter_one(
    seconds, minutes, offered, run_dir, capsys, write, monkeypatch
):
    """Six of 12 steps are left. A shorter run has what is done, and the steps of about two minutes."""
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "zaya_jax.main", "--config", "a b.yaml"])
    report = make(phases=(PhaseConfig(12 * 256),), run_dir=run_dir)
    for step in range(1, 13):
        write(report, step, seconds)
    said = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("step")]
    offer = (
        " For one of about 2, stop it with Ctrl-C, and rerun its command (python -m zaya_jax.main …, or what started "
        f"that) with: phases.train.tokens={(6 + offered) * 256} run_dir=runs/run_short"
    )
    assert said == ([f"This run takes about {minutes} minutes here.{offer if offered else ''}"] if minutes else [])


def test_the_time_left_follows_the_speed_slowly_and_counts_evaluations_and_saves(capsys, write):
    report = make(1, phases=(PhaseConfig(1000 * 256),))
    for step in range(1, 301):
        write(report, step, 1.0, pause=5.0 if step % 10 == 0 else 0.0)
    for step in range(301, 311):
        write(report, step, 2.0)
    etas = [line.rpartition("ETA ")[2].split(":") for line in capsys.readouterr().out.splitlines() if "ETA" in line]
    left = [sum(int(part) * 60**power for power, part in enumerate(reversed(parts))) for parts in etas]
    assert abs(left[299] - 700 * 1.5) < 0.05 * 700 * 1.5  # 1.5 s for each of 700 steps, with the pauses
    changes = [abs(after + 1 - before) / before for before, after in pairwise(left[50:300])]
    assert max(changes) < 0.1  # of the last steps alone, a pause would raise it by a half
    assert left[299] < left[309] < 690 * 2


def test_the_time_left_leaves_out_what_the_first_sample_and_evaluation_compile(capsys, write):
    report = make(1, phases=(PhaseConfig(100 * 256),))
    for step in range(1, 13):
        names = {4: ["sample"], 8: ["score", "sample"], 12: ["score"]}.get(step, [])
        scores = {name: {"prompt": "a", "continuation": "b"} for name in names}
        write(report, step, 1.0, pause={4: 40.0, 8: 40.0, 12: 5.0}.get(step, 0.0), **scores)
    etas = [line.rpartition("ETA ")[2] for line in capsys.readouterr().out.splitlines() if "ETA" in line]
    assert etas[:11] == [_clock(100 - step) for step in range(1, 12)]
    assert etas[11] != _clock(88)  # the second evaluation counts


def test_a_line_has_the_throughput_of_all_steps_since_the_last_one(capsys):
    report = make(2)
    for step, (seconds, mfu) in enumerate([(1.0, None), (3.0, None), (1.0, 0.5), (3.0, 0.1)], 1):
        report.write(row(step), timings(seconds, 200.0, 1e9, mfu))
    lines = [line.split(" | ")[3:5] for line in capsys.readouterr().out.splitlines()]
    assert lines == [["100 tokens/s", "100.0 GFLOP/s"], ["100 tokens/s", "MFU 20.0 %"]]


@pytest.mark.parametrize(("device", "share"), [("NVIDIA H200", 0.5), ("AMD Instinct MI355X", 0.1965), ("new", None)])
def test_throughput_counts_the_operations_of_the_steps_context_against_the_peak(device, share, monkeypatch):
    monkeypatch.setattr(module, "training_flops_per_token", lambda _, context, **more: context * 989e12 / 6400)
    config = change(CONFIG, {"phases": PHASES})
    short, long = (module.throughput(config, step, 100.0, 0.5, device, 2) for step in (10, 11))
    assert short["tokens_per_second"] == 200
    assert short["flops_per_second"] == pytest.approx(989e12)
    assert long["flops_per_second"] == pytest.approx(2 * 989e12)
    assert short["mfu"] == (share and pytest.approx(share, abs=5e-4))


def test_the_time_left_counts_the_budget_and_not_the_tokens_of_the_loss(capsys, write):
    report = make(2)
    for step in (1, 2):
        write(report, step, 1.0, 25.0)
    assert " 25 tokens/s " in (out := capsys.readouterr().out)
    assert out.rstrip().endswith("| ETA 0:10")


def test_a_run_that_resumes_has_less_time_left(capsys):
    report = make(1)
    report.start(9)
    report.write(row(10), timings(1.0))
    report.close()
    assert capsys.readouterr().out.rstrip().endswith("| ETA 0:02")


def test_evaluations_and_skipped_steps_are_told(capsys):
    labels = {"heldout_loss": "held-out", "accuracy": "acc"}
    report = make(1, [SimpleNamespace(name=name, label=label) for name, label in labels.items()])
    report.write(row(1, heldout_loss=3.14159, accuracy=0.5, skipped=2), timings())
    out = capsys.readouterr().out
    assert "| held-out 3.142 | acc 0.500 |" in out
    assert out.rstrip().endswith("| skipped 2 in a row")
    report.write(row(2, loss=float("nan")), timings(0.0, 0.0))  # neither a time nor a token passed
    assert "loss nan" in capsys.readouterr().out


def test_text_is_printed_as_it_is_and_never_wrapped(capsys):
    make().say("[bold]" + "x" * 300)
    assert capsys.readouterr().out == "[bold]" + "x" * 300 + "\n"


@given(st.integers(0, 10**6))
def test_a_clock_reads_as_clocks_do(seconds):
    parts = [int(part) for part in _clock(seconds).split(":")]
    assert len(parts) == (3 if seconds >= 3600 else 2)
    assert sum(part * 60**power for power, part in enumerate(reversed(parts))) == seconds
    assert all(part < 60 for part in parts[1:])


def test_a_run_continues_though_nobody_reads_its_output_any_more(monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        report = make(1)
        for step in (1, 2):
            report.write(row(step), timings())
        output.flush()  # as Python does at exit, where a failure would change the status
