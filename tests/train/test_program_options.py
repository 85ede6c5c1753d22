"""Compiler options of a step: those that XLA does not have are left out."""

from zaya_jax.train.program import _is_known


def test_an_option_that_xla_does_not_have_is_recognized():
    assert _is_known("xla_gpu_enable_while_loop_double_buffering", True)
    assert not _is_known("xla_gpu_no_such_option", True)
