"""Which steps are compiled, how often, and when."""

import dataclasses
import threading

import chex
import jax
import pytest

from tests.train.test_phases import PHASES
from tests.train_helpers import CONFIG, MODEL, PLAIN, change, small_run
from zaya_jax.config import BatchConfig, PhaseConfig
from zaya_jax.config.stages import stages
from zaya_jax.errors import InputError, RunStopped
from zaya_jax.train import compiled, fit
from zaya_jax.train import program as program_module
from zaya_jax.train.compiled import CompiledSteps
from zaya_jax.train.fit import run_training
from zaya_jax.train.program import PhaseProgram, make_programs

FOUR = PhaseConfig(512, "four", batch=BatchConfig(tokens=256, micro_batch=2))
RUN = change(CONFIG, {"model": dataclasses.replace(MODEL, **PLAIN), "phases": (*PHASES, FOUR)})


@pytest.fixture
def made(monkeypatch):
    """The first steps of the stages that were compiled, and an event that compiling waits for."""
    begun, may_go = [], threading.Event()
    may_go.set()

    def compile_step(program, stage):
        begun.append(stage.first_step)
        assert may_go.wait(10)
        return stage.first_step

    monkeypatch.setattr(PhaseProgram, "compile", compile_step)
    monkeypatch.setattr(compiled, "check_compiled", lambda *_: None)
    return begun, may_go


def test_the_next_step_is_compiled_while_this_one_runs(made):
    begun, may_go = made
    steps = stages(RUN)
    messages = []
    may_go.clear()

    def say(line):
        messages.append(line)
        may_go.set()

    with CompiledSteps(make_programs(RUN), say) as cache:
        assert cache.step(steps[0]) == 0
        assert messages == [f"Compiling the training step of {RUN.phase_key(0)}"]
        for _ in range(1000):  # in the background, without being asked for
            if len(begun) == 2:
                break
            threading.Event().wait(0.01)
        assert begun == [0, steps[1].first_step]
        may_go.clear()
        cache.step(steps[1])  # ready, and the third is begun: it holds up nobody
        may_go.set()


def test_what_cannot_be_compiled_is_told_where_it_is_needed(made, monkeypatch):
    begun, _ = made
    steps = stages(RUN)

    def fail(program, stage):
        begun.append(stage.first_step)
        if stage == steps[1]:
            raise ValueError("too large")
        return stage.first_step

    monkeypatch.setattr(PhaseProgram, "compile", fail)
    with CompiledSteps(make_programs(RUN)) as cache:
        assert cache.step(steps[0]) == 0  # though the next one fails meanwhile
        with pytest.raises(ValueError, match="too large"):
            cache.step(steps[1])


def test_memory_is_checked_before_a_step_runs(made, monkeypatch):
    checked = []
    monkeypatch.setattr(compiled, "check_compiled", lambda *step_and_phase: checked.append(step_and_phase))
    with CompiledSteps(make_programs(RUN)) as cache:
        got = [cache.step(stage) for stage in stages(RUN)]
    assert checked == [(step, RUN.phase_key(stage.phase)) for step, stage in zip(got, stages(RUN), strict=True)]


def keys(programs):
    """What the step of each stage is compiled for."""
    return [(programs[stage.phase], programs[stage.phase].batch_shape(stage)) for stage in stages(RUN)]


def test_phases_that_do_not_differ_share_a_program():
    programs = make_programs(RUN)
    assert [shape for _, shape in keys(programs)[:3]] == [(2, 2, 32), (4, 2, 32), (2, 2, 64)]
    assert [program.model.config.rope_base for program, _ in keys(programs)[:3]] == [1.0e4, 1.0e4, 1.0e3]
    assert {program.remat for program, _ in keys(programs)} == {"none", "dots"}
    assert jax.device_count() == 1  # which the numbers of sequences above are for
    facts = {(program.model.config, program.placement, program.remat) for program, _ in keys(programs)}
    assert len({program for program, _ in keys(programs)}) == len(facts) < len(RUN.phases)


def test_each_shape_is_traced_once(monkeypatch):
    programs = make_programs(RUN)
    chex.clear_trace_counter()  # of functions it tells apart by where they are defined alone: all steps are one
    count = len(set(keys(programs)))
    monkeypatch.setattr(program_module, "make_train_step",
                        lambda _: chex.assert_max_traces(lambda state, batch, base: (state, batch), count))  # fmt: skip
    monkeypatch.setattr(PhaseProgram, "compile", PhaseProgram.trace)
    monkeypatch.setattr(compiled, "check_compiled", lambda *_: None)
    with CompiledSteps(programs) as steps:
        for stage in stages(RUN):
            steps.step(stage)


@pytest.mark.usefixtures("quick")
def test_the_step_compiles_while_parameters_are_drawn_once_every_input_is_checked(tmp_path, monkeypatch):
    begun = threading.Event()

    def compile_step(program, stage):
        begun.set()
        return program.train_step

    def draw(*arguments):
        assert begun.wait(10)
        raise RunStopped("drawn")

    monkeypatch.setattr(PhaseProgram, "compile", compile_step)
    monkeypatch.setattr(fit, "initialize", draw)
    with pytest.raises(InputError, match="init_from"):
        run_training(small_run(tmp_path, f"init_from={tmp_path}"))
    assert not begun.is_set()
    with pytest.raises(RunStopped, match="drawn"):
        run_training(small_run(tmp_path))
