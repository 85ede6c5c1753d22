"""Which steps are compiled, how often, and when."""

import threading

import jax
import pytest

from tests.train.test_phases import PHASES
from tests.train_helpers import CONFIG, change
from zaya_jax.config import BatchConfig, PhaseConfig
from zaya_jax.config.stages import stages
from zaya_jax.train import compiled
from zaya_jax.train.compiled import CompiledSteps, step_key

RUN = change(CONFIG, {"phases": (*PHASES, PhaseConfig(512, "four", batch=BatchConfig(tokens=256, micro=2)))})


@pytest.fixture
def made(monkeypatch):
    """The first steps of the stages that were compiled, and an event that compiling waits for."""
    begun, may_go = [], threading.Event()
    may_go.set()

    def compile_step(config, stage, target):
        begun.append(stage.first_step)
        assert may_go.wait(10)
        return stage.first_step

    monkeypatch.setattr(compiled, "compile_step", compile_step)
    monkeypatch.setattr(compiled, "check_compiled", lambda *_: None)
    return begun, may_go


def test_the_next_step_is_compiled_while_this_one_runs(made):
    begun, may_go = made
    steps = stages(RUN)
    with CompiledSteps(RUN) as found:
        assert found.step(steps[0]) == 0
        for _ in range(1000):  # in the background, without being asked for
            if len(begun) == 2:
                break
            threading.Event().wait(0.01)
        assert begun == [0, steps[1].first_step]
        may_go.clear()
        found.step(steps[1])  # ready, and the third is begun: it holds up nobody
        may_go.set()


def test_what_cannot_be_compiled_is_told_where_it_is_needed(made, monkeypatch):
    begun, _ = made
    steps = stages(RUN)

    def fail(config, stage, target):
        begun.append(stage.first_step)
        if stage == steps[1]:
            raise ValueError("too large")
        return stage.first_step

    monkeypatch.setattr(compiled, "compile_step", fail)
    with CompiledSteps(RUN) as found:
        assert found.step(steps[0]) == 0  # though the next one fails meanwhile
        with pytest.raises(ValueError, match="too large"):
            found.step(steps[1])


def test_memory_is_checked_before_a_step_runs(made, monkeypatch):
    checked = []
    monkeypatch.setattr(compiled, "check_compiled", lambda *step_and_phase: checked.append(step_and_phase))
    with CompiledSteps(RUN) as found:
        got = [found.step(stage) for stage in stages(RUN)]
    assert checked == [(step, RUN.phase_key(stage.phase)) for step, stage in zip(got, stages(RUN), strict=True)]


def test_stages_that_are_alike_share_what_is_compiled(made):
    begun, _ = made
    steps = stages(RUN)
    with CompiledSteps(RUN) as found:
        got = [found.step(stage) for stage in steps]
    keys = [step_key(RUN, stage) for stage in steps]
    assert len(begun) == len(set(begun)) == len(set(keys)) < len(steps)
    assert len({*zip(keys, got, strict=True)}) == len(set(keys))


def test_a_key_tells_apart_what_is_compiled_differently():
    keys = [step_key(RUN, stage) for stage in stages(RUN)]
    assert [(key.micro_batches, key.sequences, key.context) for key in keys[:3]] == [(2, 2, 32), (4, 2, 32), (2, 2, 64)]
    assert [key.rope_base for key in keys[:3]] == [1.0e4, 1.0e4, 1.0e3]
    assert {key.remat for key in keys} == {"none", "dots"}
    assert jax.device_count() == 1  # which the numbers of sequences above are for
