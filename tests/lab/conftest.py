"""Estimates share what is traced: residuals of a model, policy and layout, and the kernels for a model's shapes."""

import dataclasses
import functools

import pytest

from zaya_jax.lab.predict.dry_run import estimate, memory
from zaya_jax.ops.registry import select_kernels

_count, _counted, _select = memory.residual_bytes, {}, functools.cache(select_kernels)


def _once(program, sequences, context):
    config = program.config
    layout = dataclasses.replace(program.placement.config, data=None, gradient_reduction="step")  # which change nothing
    key = program.model.config, program.remat, config.lora, config.train.compute_dtype, layout, sequences, context
    if key not in _counted:
        _counted[key] = _count(program, sequences, context)
    return _counted[key]


@pytest.fixture(autouse=True, scope="module")
def counted_once():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "residual_bytes", _once)
        patch.setattr(estimate, "select_kernels", _select)
        yield
