"""Compiler options of a step: those that XLA does not have are left out."""

from zaya_jax.train.program import known_options


def test_an_option_that_xla_does_not_have_is_left_out():
    known = {"xla_gpu_enable_while_loop_double_buffering": True, "xla_backend_optimization_level": 1}
    assert known_options({**known, "xla_gpu_no_such_option": True}) == known
    assert known_options({"xla_gpu_no_such_option": True}) is None
