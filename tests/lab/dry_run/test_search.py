"""The search for faster settings: what it finds fits, is sorted, and is what its overrides make."""

import dataclasses
import json
import re

import pytest

from tests.lab.helpers import share_states
from tests.train_helpers import ROOT
from zaya_jax.config import load_config
from zaya_jax.hardware.data_sheets import HARDWARE
from zaya_jax.lab.predict.dry_run import dry_run_report as report
from zaya_jax.lab.predict.dry_run import memory
from zaya_jax.lab.predict.dry_run import search as module
from zaya_jax.lab.predict.dry_run.estimate import estimate_phase, simulated_programs
from zaya_jax.lab.predict.dry_run.memory import count_activations, residual_bytes
from zaya_jax.lab.predict.dry_run.search import ActivationTable, least_activations, overrides, suggest, suggestion_lines
from zaya_jax.main import main

OVERRIDES = ["train.compute_dtype=bfloat16", "train.batch.tokens=4096", "model.num_layers=1", "data.context=256",
             "model.num_experts=2", "model.attention=gqa", "model.router=linear"]  # fmt: skip
CONFIG, H200, ALL = load_config(ROOT / "configs/tiny.yaml", OVERRIDES), HARDWARE["h200"], 1000


def made_up(patch):
    """Programs of one shape share their state, and residuals, which take a second to count, are made up."""
    factors = {"none": 3, "dots": 2, "full": 1}

    def residuals(program, sequences, context):
        parallel, least = program.placement.config, least_activations(program, sequences + 1, context).kept
        return least * factors[program.remat] * (4 - parallel.expert - (parallel.fsdp > 1))

    share_states(patch)
    for counts in (module, memory):
        patch.setattr(counts, "residual_bytes", residuals)


@pytest.fixture(autouse=True)
def residuals_made_up(counted_once, monkeypatch):
    made_up(monkeypatch)


@pytest.fixture(scope="module")
def found():
    with pytest.MonkeyPatch.context() as patch:
        made_up(patch)
        return suggest(CONFIG, 0, 4, H200, ALL)


def test_suggestions_are_sorted_and_cover_what_may_be_changed(found):
    times = [sum(suggestion.estimate.seconds.values()) for suggestion in found]
    assert times == sorted(times)
    axes = {tuple(suggestion.estimate.axes.values())[1:] for suggestion in found}
    assert axes == {(fsdp, expert, 1) for fsdp in (1, 2, 4) for expert in (1, 2) if fsdp * expert <= 4}
    assert {suggestion.estimate.remat for suggestion in found} == {"none", "dots", "full"}
    assert {suggestion.estimate.sequences for suggestion in found} == {1, 2, 4}  # of 16 on 4 devices
    assert len({overrides(CONFIG, 0, suggestion.config) for suggestion in found}) == len(found)


def test_the_fastest_are_those_of_all(found):
    """With fewer estimates: bounds leave out what cannot be among them."""
    times = [suggestion.estimate.step_seconds for suggestion in found]
    assert [suggestion.estimate.step_seconds for suggestion in suggest(CONFIG, 0, 4, H200, 3)] == times[:3]


def test_the_overrides_make_the_configuration_whose_estimate_is_shown(found):
    for suggestion in (found[0], found[len(found) // 2], found[-1]):
        changed = load_config(ROOT / "configs/tiny.yaml", [*OVERRIDES, *overrides(CONFIG, 0, suggestion.config)])
        estimate = estimate_phase(simulated_programs(changed, 4), 0, H200)
        assert estimate.axes == suggestion.estimate.axes
        assert estimate.memory.total == pytest.approx(suggestion.estimate.memory.total, rel=0.02)
        assert estimate.step_seconds == pytest.approx(suggestion.estimate.step_seconds, rel=0.02)


def test_counts_of_more_sequences_follow_from_those_of_one_and_two(monkeypatch):
    counted = {}

    def residuals(program, *shape):  # the program of one layer is that of a group of layers
        if (program.remat, *shape) not in counted:
            counted[program.remat, *shape] = residual_bytes(program, *shape)
        return counted[program.remat, *shape]

    monkeypatch.setattr(module, "residual_bytes", residuals)
    config = load_config(ROOT / "configs/tiny.yaml", [*OVERRIDES, "train.remat=full", "parallel.fsdp=2"])
    program = simulated_programs(config, 2)[0]
    assert ActivationTable()(program, 4, 256) == pytest.approx(count_activations(program, 4, 256, residuals), rel=0.01)


@pytest.mark.soak
def test_only_what_fits_is_suggested_with_wider_layouts_if_nothing_else_does():
    found = suggest(CONFIG, 0, 4, H200, ALL)
    sizes = sorted(suggestion.estimate.memory.total for suggestion in found)
    small = H200._replace(memory=1.001 * sizes[len(sizes) // 4] / H200.memory_fraction)
    fitting = suggest(CONFIG, 0, 4, small, ALL)
    assert 0 < len(fitting) <= len(found) // 3
    assert all(suggestion.estimate.memory.total <= small.allocatable for suggestion in fitting)
    smaller = H200._replace(memory=0.99 * sizes[0] / H200.memory_fraction)
    wide = suggest(CONFIG, 0, 4, smaller, ALL)
    assert all(suggestion.estimate.reduce == "micro_batch" for suggestion in wide)
    assert any(suggestion.estimate.axes["context"] > 1 for suggestion in wide)
    assert suggest(CONFIG, 0, 4, H200._replace(memory=1e6)) == []
    assert suggestion_lines("train", []) == ["No layout, remat and micro-batch of phase train is estimated to fit."]


def test_a_phase_with_its_own_sections_has_its_own_keys():
    phase = dataclasses.replace(CONFIG.phases[0], remat="full", batch=CONFIG.train.batch, parallel=CONFIG.parallel)
    config = dataclasses.replace(CONFIG, phases=(phase,))
    changes = (overrides(config, 0, suggestion.config) for suggestion in suggest(config, 0, 2, H200, ALL))
    keys = {text.partition("=")[0] for change in changes for text in change}
    layout = {f"parallel.{name}" for name in ("fsdp", "expert", "expert_exchange")}
    assert keys == {f"phases.train.{key}" for key in (*layout, "remat", "batch.micro_batch")}


def test_the_command_lists_the_fastest(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(report, "prove", lambda *_: {"proof": "compiled", "seconds": 1, "host_bytes": 1})
    arguments = ["--config", "configs/tiny.yaml", *OVERRIDES, "--dry-run", "--devices", "2", "--hardware", "h200"]
    assert main([*arguments, "--suggest", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["phases"][0]["suggestions"]
    assert [row["seconds"] for row in rows] == sorted(row["seconds"] for row in rows)
    assert all(not row["compiled"] and row["bytes"] > 0 for row in rows)
    monkeypatch.setattr(report, "suggestions", lambda *_: rows)
    assert main([*arguments, "--suggest"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^Fastest settings of phase train\n +s/step +GB +source +change\n", text, re.MULTILINE)
