"""Compiler options of a step."""

import dataclasses
import functools

import pytest

from tests.config_helpers import changed
from tests.train_helpers import CONFIG
from zaya_jax.config.schema import ProfileConfig
from zaya_jax.config.stages import stages
from zaya_jax.hardware.presets import TRACED
from zaya_jax.ops.registry import KernelSelection
from zaya_jax.ops.target import Target
from zaya_jax.train import program
from zaya_jax.train.program import COMPILED_QUICKLY, Programs, known_options


def test_an_option_that_xla_does_not_have_is_left_out():
    known = {"xla_gpu_enable_while_loop_double_buffering": True, "xla_backend_optimization_level": 1,
             TRACED.name.removeprefix("--"): TRACED.value}  # fmt: skip
    assert known_options({**known, "xla_gpu_no_such_option": True}) == known
    assert known_options({"xla_gpu_no_such_option": True}) is None


@pytest.mark.parametrize("platform", ["cpu", "cuda", "rocm"])
@pytest.mark.parametrize("profile", [None, ProfileConfig(1)])
def test_what_is_traced_on_a_gpu_has_no_command_buffers(platform, profile, monkeypatch):
    config = dataclasses.replace(CONFIG, profile=profile)
    calls = []
    monkeypatch.setattr(program, "known_options", calls.append)
    make = functools.partial(Programs, config, KernelSelection(Target(platform, "")), 1)
    make()[0].trace(stages(config)[0])
    make()[0].jit_evaluation()
    traced = {"xla_gpu_enable_command_buffer": ""} if profile else {}
    assert calls == [COMPILED_QUICKLY if platform == "cpu" else traced] * 2


@pytest.mark.parametrize("changes", [{"train.compute_dtype": "bfloat16"}, {"model.vocab_size": 2_000_000}])
def test_a_step_that_would_be_slower_on_a_cpu_is_compiled_in_full(changes):
    config, kernels = changed(CONFIG, changes), KernelSelection(Target("cpu", ""))
    assert Programs(CONFIG, kernels, 1)[0]._options() == COMPILED_QUICKLY
    assert Programs(config, kernels, 1)[0]._options() is None
