import os
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zaya_jax.train.console import ConsoleReport, _clock


def make(**changes):
    options = {"steps": 20, "start": 0, "log_every": 5, "flops_per_token": lambda _: 2e6,
               "bytes_per_token": lambda _: 4.0, "tokens_left": lambda step: (12 - step) * 100, "devices": 2,
               "device_kind": "cpu"}  # fmt: skip
    return ConsoleReport(**{**options, **changes})


def row(step, **changes):
    return {
        "step": step,
        "phase": "train",
        "loss": 2.772588722239781,
        "tokens": 100.0,
        "load_entropy": [0.5, 1.0],
        "skipped": 0,
        **changes,
    }


def test_a_line_every_few_steps_and_one_at_the_end(capsys):
    with make(steps=12) as report:
        for step in range(1, 13):
            report.write(row(step), {"seconds": 0.5})
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in lines] == ["step 5/12", "step 10/12", "step 12/12"]
    assert lines[0] == (
        "step 5/12 | loss 2.773 | 1.000 bits/byte | 200 tokens/s | 0.4 GFLOP/s | load entropy 0.750 | ETA 0:04"
    )
    assert lines[2].endswith("| ETA 0:00")


@pytest.mark.parametrize(
    ("kind", "share"),
    [
        ("NVIDIA H200", "MFU 50.0 %"),
        ("gfx942", "MFU 37.8 %"),
        ("AMD Instinct MI355X", "MFU 21.5 %"),
        ("new", "GFLOP/s"),
    ],
)
def test_a_known_device_gives_the_share_of_its_peak(capsys, kind, share):
    report = make(device_kind=kind, flops_per_token=lambda _: 989e12 / 200, log_every=1)
    report.write(row(1, tokens=100.0), {"seconds": 0.5})
    assert share in capsys.readouterr().out


def test_the_operations_of_a_token_are_those_of_the_step(capsys):
    asked = []
    report = make(device_kind="new", flops_per_token=lambda step: asked.append(step) or step * 1e9, log_every=2)
    for step in range(1, 5):
        report.write(row(step), {"seconds": 0.5})
    assert asked == [2, 4]
    assert [line.split(" | ")[4] for line in capsys.readouterr().out.splitlines()] == ["400.0 GFLOP/s", "800.0 GFLOP/s"]


def test_the_time_left_counts_the_budget_and_not_the_tokens_of_the_loss(capsys):
    report = make(log_every=2)
    for step in (1, 2):
        report.write(row(step, tokens=25.0), {"seconds": 1.0})
    assert " 25 tokens/s " in (out := capsys.readouterr().out)
    assert out.rstrip().endswith("| ETA 0:10")


def test_the_speed_of_a_step_has_no_share_of_a_peak_that_is_not_known():
    known, unknown = make(device_kind="NVIDIA H200"), make(device_kind="new")
    speed = {"tokens_per_second": 200.0, "flops_per_second": 4e8, "mfu": 4e8 / 2 / 989e12}
    assert known.throughput(1, 100.0, 0.5) == pytest.approx(speed)
    assert unknown.throughput(1, 100.0, 0.5) == speed | {"mfu": None}


def test_evaluations_and_skipped_steps_are_told(capsys):
    report = make(log_every=1)
    report.labels = {"heldout_loss": "held-out", "accuracy": "acc"}
    report.write(row(1, heldout_loss=3.14159, accuracy=0.5, skipped=2), {"seconds": 1.0})
    out = capsys.readouterr().out
    assert "| held-out 3.142 | acc 0.500 |" in out
    assert out.rstrip().endswith("| skipped 2 in a row")
    report.write(row(2, loss=float("nan"), tokens=0.0), {"seconds": 0.0})  # neither a time nor a token passed
    assert "loss nan" in capsys.readouterr().out


def test_text_is_printed_as_it_is_and_never_wrapped(capsys):
    with make() as report:
        report.say("[bold]" + "x" * 300)
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
        report = make(log_every=1)
        for step in (1, 2):
            report.write(row(step), {"seconds": 0.5})
        output.flush()  # as Python does at exit, where a failure would change the status
