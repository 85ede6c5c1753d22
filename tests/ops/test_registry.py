import dataclasses
import functools

import jax
import pytest

from zaya_jax.ops import registry as room
from zaya_jax.ops.registry import OPERATIONS, KernelSelection, choose, validate_kernels
from zaya_jax.ops.selfcheck import EXAMPLE, Check, operation_checks
from zaya_jax.ops.target import Target

GPU, EMULATED = Target("rocm", "gfx942"), Target("interpret", "any")
SMALL = dataclasses.replace(EXAMPLE, num_query_heads=2, num_kv_heads=1, head_dim=64, hidden_size=64, num_experts=2)


def test_every_operation_has_checks_that_there_are():
    assert {name for names in OPERATIONS.values() for name in names} <= operation_checks(SMALL).keys()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_gpu_has_all_kernels_for_the_released_shapes(dtype):
    choice = choose(GPU, EXAMPLE, dtype)
    assert choice.kernels == list(OPERATIONS)
    assert str(choice) == f"Kernels for gfx942: {', '.join(OPERATIONS)}."


def test_a_cpu_has_none_and_says_so():
    choice = choose(Target("cpu", "any"), SMALL, "bfloat16")
    assert choice.kernels == []
    assert str(choice) == "There are no kernels for cpu: all operations are XLA's."
    assert validate_kernels(choice, SMALL, "bfloat16") is choice


def test_double_precision_is_left_to_the_references_and_the_reasons_are_said():
    choice = choose(GPU, SMALL, "float64")
    assert choice.kernels == []
    assert choice.reasons.keys() == OPERATIONS.keys()
    assert str(choice).startswith("Kernels for gfx942: none. Not residual_norm: ")
    assert choice.target.without == tuple(OPERATIONS)


def test_what_a_kernel_refuses_of_a_shape_is_left_to_its_reference():
    choice = choose(GPU, dataclasses.replace(SMALL, head_dim=48), "bfloat16")
    assert choice.kernels == ["residual_norm", "grouped_matmul", "momentum", "symmetric"]
    assert all("48" in choice.reasons[name] for name in ("cca_mix", "attention"))


def test_what_is_asked_to_be_left_out_stays_out():
    choice = choose(dataclasses.replace(GPU, without=("attention",)), SMALL, "bfloat16")
    assert choice.kernels == [name for name in OPERATIONS if name != "attention"]
    assert choice.reasons == {}


def only(monkeypatch, run, gradient=True):
    """The check of `symmetric` alone, of the operation `run`."""
    check = operation_checks(SMALL)["orthogonalize"]
    monkeypatch.setattr(room, "operation_checks", lambda _: {"orthogonalize": Check(run, check.arrays, gradient)})
    return KernelSelection(
        dataclasses.replace(EMULATED, without=tuple(name for name in OPERATIONS if name != "symmetric"))
    )


def test_a_kernel_that_is_right_is_kept(monkeypatch):
    choice = only(monkeypatch, lambda target, m: 2 * m)
    assert validate_kernels(choice, SMALL, "float32").kernels == ["symmetric"]


def fails(target, m):
    if target.platform == "interpret":
        raise RuntimeError("out of  shared memory")
    return m


@pytest.mark.parametrize(("run", "why"), [
    (lambda target, m: m * (1.1 if target.platform == "interpret" else 1), "it is 0.1 off, but may be 0.001."),
    (fails, "it fails with RuntimeError: out of shared memory"),
])  # fmt: skip
def test_a_kernel_that_is_wrong_or_fails_is_left_out_with_a_warning(monkeypatch, run, why):
    with pytest.warns(UserWarning, match=f"^The kernel of symmetric is not used on this any: {why}"):
        found = validate_kernels(only(monkeypatch, run), SMALL, "float32")
    assert found.kernels == []
    assert found.reasons == {"symmetric": why}
    assert found.target == Target("interpret", "any", without=tuple(OPERATIONS))


@pytest.mark.soak
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_all_kernels_emulated_are_right(dtype):
    choice = validate_kernels(choose(EMULATED, SMALL, dtype), SMALL, dtype)
    assert choice.kernels == list(OPERATIONS)


def test_a_choice_is_a_static_value():
    seen = []

    @functools.partial(jax.jit, static_argnums=0)
    def traced(target, x):
        seen.append(target)
        return x

    for without in ((), ("attention",), ()):
        traced(dataclasses.replace(GPU, without=without), 1.0)
    assert [target.without for target in seen] == [(), ("attention",)]
