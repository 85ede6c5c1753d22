import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zaya_jax.ops import momentum
from zaya_jax.ops.selfcheck import TOLERANCE, Check, check_operations, compare, operation_checks
from zaya_jax.ops.target import Target

X = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)


def test_every_operation_has_a_check_on_inputs_that_fp32_holds():
    checks = operation_checks()
    assert {name.partition(",")[0] for name in checks} == {
        "residual_norm", "cca_mix", "attention", "grouped_matmul", "dispatch_experts", "rms_norm", "momentum",
        "orthogonalize",
    }  # fmt: skip
    assert all(array.dtype == np.float32 and np.isfinite(array).all() for c in checks.values() for array in c.arrays)
    assert all(check.tolerance.keys() == TOLERANCE.keys() for check in checks.values())


def test_an_operation_that_rounds_is_within_its_tolerance():
    found = check_operations({"rms_norm": operation_checks()["rms_norm"]})
    assert "failed" not in found
    assert 0 < found["errors"]["rms_norm float32"]["error"] < 1e-6
    assert 1e-4 < found["errors"]["rms_norm bfloat16"]["error"] < 2e-2


@pytest.mark.soak
def test_all_operations_are_within_their_tolerances():
    assert "failed" not in check_operations(operation_checks())


def on_device_only(wrong):
    """An operation that is wrong wherever it computes in less than fp64."""
    return lambda _, x: wrong(x) if x.dtype != jnp.float64 else x * x


@pytest.mark.parametrize("wrong", [
    lambda x: x * x * 1.1,
    lambda x: (x * x).at[0, 0].set(jnp.nan),
    lambda x: x * jax.lax.reduce_precision(x, exponent_bits=5, mantissa_bits=10).at[0, 0].set(0),
])  # fmt: skip
def test_a_wrong_result_fails_with_a_sentence(wrong):
    found = check_operations({"square": Check(on_device_only(wrong), [X])}, ["float32"])
    assert found["failed"].startswith("square in float32 is ")
    assert found["failed"].endswith(" off, but may be 0.001.")


def test_a_wrong_gradient_fails_where_the_result_is_right():
    def stuck(x):
        return x * x + 0 * x if x.dtype == jnp.float64 else jnp.asarray(X) * x

    check = Check(lambda _, x: stuck(x), [X])
    assert compare(check, ["float32"])["float32"] == pytest.approx(0.5)
    assert compare(check._replace(gradient=False), ["float32"])["float32"] < 1e-6


def test_a_skipped_step_that_lets_its_gradient_through_is_seen(monkeypatch):
    check, target = operation_checks()["momentum"], Target("interpret", "any")
    right = momentum.momentum_and_direction

    def leaking(gradient, *others, **how):
        new, direction = right(gradient, *others, **how)
        return new + 0 * gradient, direction

    assert compare(check, ["bfloat16"], target)["bfloat16"] <= check.tolerance["bfloat16"]
    monkeypatch.setattr(momentum, "momentum_and_direction", leaking)
    assert np.isnan(compare(check, ["bfloat16"], target)["bfloat16"])
