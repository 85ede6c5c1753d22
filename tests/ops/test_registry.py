import dataclasses
import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernel_helpers import kernels
from zaya_jax.ops import LOCAL, registry
from zaya_jax.ops.operation import Check, Input, Kernel, Operation
from zaya_jax.ops.registry import (
    OPERATIONS,
    KernelSelection,
    check_operations,
    preferred_kernels,
    reject,
    rejections,
    select_kernels,
    validate_kernels,
)
from zaya_jax.ops.selfcheck import EXAMPLE, compare_large
from zaya_jax.ops.target import Target

GPU, EMULATED = Target("rocm", "AMD Instinct MI300X", "gfx942"), Target("interpret", "any")
SMALL = dataclasses.replace(EXAMPLE, num_query_heads=2, num_kv_heads=1, head_dim=64, hidden_size=64, num_experts=2,
                            expert_size=32)  # fmt: skip
_RUNS = itertools.count()
WITH_KERNELS = [name for name, operation in OPERATIONS.items() if operation.kernels]


@pytest.fixture(autouse=True)
def nothing_tried(monkeypatch):
    monkeypatch.setattr(registry, "_rejected", {})
    monkeypatch.setattr(registry, "_passed", {})


def test_a_gpu_has_all_kernels_for_the_released_shapes():
    selection = select_kernels(GPU, EXAMPLE, "bfloat16")
    assert selection == preferred_kernels(GPU)
    assert list(selection.chosen) == WITH_KERNELS
    assert not selection.reasons
    assert [*select_kernels(GPU, EXAMPLE, "float32").chosen] == WITH_KERNELS
    assert "AMD Instinct MI300X: residual_norm, cca_mix (pallas), attention" in str(selection)


def test_a_cpu_has_none_and_its_ops_are_the_references():
    selection = select_kernels(Target("cpu", "any"), SMALL, "bfloat16")
    assert selection == validate_kernels(selection, SMALL, "bfloat16") == KernelSelection(Target("cpu", "any"))
    assert "no kernels for cpu" in str(selection)
    assert selection.ops == LOCAL


def test_double_precision_is_left_to_the_references_and_the_reasons_are_said():
    selection = select_kernels(GPU, SMALL, "float64")
    assert selection.chosen == {}
    assert {operation for operation, _ in selection.reasons} == set(WITH_KERNELS)
    assert all("float64" in reason for reason in selection.reasons.values())
    assert "none. No pallas kernel for residual_norm: " in str(selection)


@pytest.mark.parametrize(("changes", "reasons"), [
    ({"convolutions": False}, {"cca_mix": "need convolutions", "cca_mix_step": "reach at least one token"}),
    ({"query_key_mean": False}, {"cca_mix": "QK-mean", "cca_mix_step": "QK-mean"}),
    ({"value_shift": False}, {"cca_mix": "value shift", "cca_mix_step": "value shift"}),
])  # fmt: skip
def test_an_ablation_that_a_kernel_lacks_is_left_to_the_reference(changes, reasons):
    selection = select_kernels(GPU, dataclasses.replace(EXAMPLE, **changes), "bfloat16")
    assert list(selection.chosen) == [name for name in WITH_KERNELS if name not in reasons]
    for operation, words in reasons.items():
        assert words in selection.reasons[operation, "pallas"]


@pytest.mark.parametrize("name", ["cca_mix", "attention"])
def test_a_pin_to_the_reference_holds_in_decode_steps_too(name):
    selection = select_kernels(GPU, EXAMPLE, "bfloat16", pinned={name: registry.REFERENCE})
    same = {x.name for x in OPERATIONS.values() if name in (x.name, x.step_of, x.measured_as)}
    assert len(same) > 1
    assert selection.chosen.keys() == set(WITH_KERNELS) - same
    assert (selection.ops.cca_mix_step is None) == (name == "cca_mix")


def test_training_neither_tries_nor_names_kernels_of_decode_steps(monkeypatch):
    tried = []
    monkeypatch.setattr(registry, "check_kernel", lambda selection, name, *_: tried.append(name) or ("", True))
    steps = {name for name, operation in OPERATIONS.items() if operation.step_of}
    assert steps
    for training, left in ((True, set()), (False, steps)):
        tried.clear()
        found = validate_kernels(select_kernels(GPU, EXAMPLE, "bfloat16"), EXAMPLE, "bfloat16", training=training)
        assert steps & {*tried} == steps & found.chosen.keys() == left
        assert (found.ops.router_step is None) == training
    assert "experts of few" not in OPERATIONS["experts"].checks(EXAMPLE, True)


@pytest.mark.parametrize(("changes", "dtype", "supported"), [
    ({"router_size": 512}, "bfloat16", True), ({"router_size": 256}, "float32", True),
    ({"router_size": 512}, "float32", False), ({"head_dim": 256}, "bfloat16", True),
    ({"head_dim": 256}, "float32", False),
])  # fmt: skip
def test_kernels_of_decode_steps_that_would_not_fit_are_not_used(changes, dtype, supported):
    """As `tests/lab/compilers` compiles them for an MI300X: 128 KiB of shared memory, and spilled registers."""
    chosen = select_kernels(GPU, dataclasses.replace(EXAMPLE, **changes), dtype).chosen
    assert ({"cca_mix_step", "router_step"} <= chosen.keys()) == supported


def test_a_step_s_large_caches_are_checked():
    """As if a kernel addressed the last rows of a large cache in too few bits."""
    check = OPERATIONS["cca_mix_step"].checks(SMALL, False)["cca_mix_step"]

    def narrow(*arguments):
        q, (k_btx, *others) = OPERATIONS["cca_mix_step"].reference(*arguments)
        return q, (k_btx if len(k_btx) <= 32 else k_btx.at[-1].set(0), *others)

    for implementation, wrong in ((OPERATIONS["cca_mix_step"].reference, False), (narrow, True)):
        apart = compare_large(check, "float32", implementation, 2**20, sys.maxsize)
        assert (apart > check.tolerance["float32"]) == wrong


def test_what_a_kernel_does_not_support_is_left_to_its_reference_and_refused_where_it_is_called():
    selection = select_kernels(GPU, dataclasses.replace(SMALL, head_dim=48), "bfloat16")
    without = {name for name in WITH_KERNELS if name not in selection.chosen}
    assert without == {"cca_mix", "cca_mix_step", "attention", "partial_attention", "partial_attention_gradient"}
    assert all("48" in reason for reason in selection.reasons.values())
    heads = jnp.zeros((1, 4, 2, 48))
    with pytest.raises(ValueError, match="48"):
        kernels("rocm").ops.attention(heads, heads, heads)


def test_a_part_is_counted_where_the_whole_has_no_kernel():
    selection = preferred_kernels(GPU)
    parts = set(OPERATIONS["experts"].uses)
    assert not parts & selection.kernels.keys()
    assert parts < selection.without(("experts",)).kernels.keys()


def wrong(_architecture, x):
    return x * (1.1 if x.dtype != jnp.float64 else 1)


def failing(_architecture, x):
    raise RuntimeError("out of  shared memory")


def wrong_where_large(_architecture, x):
    """As if the addresses of all but the first elements of a large array were computed in too few bits."""
    return x if x.shape[0] <= 8 else x.at[-1].set(0)


def restless(_architecture, x):
    """As if the order of additions varied from run to run."""
    noise = jax.pure_callback(lambda: np.float32(1e-6 * next(_RUNS)), jax.ShapeDtypeStruct((), np.float32))
    return x * (1 + noise)


def right(_architecture, x):
    return 1.0 * x


def supported(*_, **__):
    return ""


def operation(monkeypatch, *runs):
    """A registry of one operation, which has these kernels in order of preference."""
    checks = {"gram_polynomial": Check(lambda implementation, x: implementation(x), (Input((8, 16)),), 1)}
    made = tuple(Kernel(run.__name__, run, supported, ()) for run in runs)
    found = Operation("gram_polynomial", lambda x: x, lambda *_: checks, made)
    monkeypatch.setattr(registry, "OPERATIONS", {"gram_polynomial": found})
    return select_kernels(EMULATED, SMALL, "float32")


def test_a_kernel_that_is_right_is_kept_and_tried_once(monkeypatch):
    selection = operation(monkeypatch, right, failing)
    assert validate_kernels(selection, SMALL, "float32", large=2**12) == selection
    monkeypatch.setattr(registry, "compare", lambda *_: pytest.fail("tried again"))
    assert validate_kernels(selection, SMALL, "float32", large=2**12) == selection


@pytest.mark.parametrize(("run", "reason"), [
    (wrong, r"its error is 0\.1, above the tolerance 0\.001"),
    (failing, "it failed with RuntimeError: out of shared memory"),
    (wrong_where_large, "its error on arrays above 4 GiB is "),
])  # fmt: skip
def test_a_kernel_that_fails_is_rejected_in_the_process_and_the_next_one_takes_its_place(monkeypatch, run, reason):
    selection = operation(monkeypatch, run, right)
    with pytest.warns(UserWarning, match=f"{run.__name__} kernel for gram_polynomial .* any: {reason}"):
        found = validate_kernels(selection, SMALL, "float32", large=2**12)
    assert found.chosen == {"gram_polynomial": "right"}
    assert select_kernels(EMULATED, EXAMPLE, "bfloat16").chosen == {"gram_polynomial": "right"}
    assert [rejected[:2] for rejected in rejections(EMULATED)] == [["gram_polynomial", run.__name__]]
    assert rejections(GPU) == []


def test_a_kernel_whose_bits_vary_is_rejected_on_a_gpu(monkeypatch):
    operation(monkeypatch, restless, right)
    selection = select_kernels(GPU, SMALL, "float32")
    with pytest.warns(UserWarning, match="restless kernel for gram_polynomial .*: two runs .* gave different bits"):
        found = validate_kernels(selection, SMALL, "float32", large=2**12)
    assert found.chosen == {"gram_polynomial": "right"}


def test_with_no_kernel_left_the_reference_is_used(monkeypatch):
    selection = operation(monkeypatch, wrong)
    with pytest.warns(UserWarning, match="wrong kernel for gram_polynomial"):
        found = validate_kernels(selection, SMALL, "float32")
    assert found.implementation("gram_polynomial")(2) == 2
    assert "No wrong kernel for gram_polynomial: its error is 0.1, above the tolerance" in str(found)


def test_large_arrays_that_do_not_fit_are_told(monkeypatch):
    selection = operation(monkeypatch, right)
    monkeypatch.setattr(registry, "free_memory", lambda: 1000)
    for _ in range(2):
        found = validate_kernels(selection, SMALL, "float32", large=2**12)
        assert found.untried == ("gram_polynomial",)
    assert "Not checked on arrays above 4 GiB, for lack of memory: gram_polynomial." in str(found)


def test_a_failed_whole_is_replaced_by_kernels_of_its_parts(monkeypatch):
    tried = []
    monkeypatch.setattr(registry, "check_kernel", lambda selection, name, *_: tried.append(name) or ("", True))
    selection = preferred_kernels(GPU)
    for kernel in OPERATIONS["experts"].kernels:
        with pytest.warns(UserWarning, match="experts"):
            reject(GPU, "experts", kernel.name, "it fails.")
    found = validate_kernels(select_kernels(GPU, EXAMPLE, "bfloat16"), EXAMPLE, "bfloat16", training=False)
    assert set(tried) == selection.kernels.keys() - {"experts"} | set(OPERATIONS["experts"].uses)
    assert "No pallas kernel for experts: it fails." in str(found)


def test_checks_have_the_widths_of_the_model_and_follow_what_is_done():
    for operation in OPERATIONS.values():
        for check in operation.checks(EXAMPLE, True).values():
            sizes = {size for x in check.inputs for size in x.shape}
            widths = {EXAMPLE.hidden_size, EXAMPLE.head_dim, EXAMPLE.router_size, EXAMPLE.expert_size}
            assert sizes & widths, operation.name
    for name in ("attention", "partial_attention"):
        assert f"{name}, decode" in OPERATIONS[name].checks(EXAMPLE, False)
    assert not OPERATIONS["gram_polynomial"].checks(EXAMPLE, False)


def test_an_operation_that_rounds_is_within_its_tolerance():
    found = check_operations(Target("cpu", "any"), SMALL, names=["grouped_outer"])
    assert "failed" not in found
    assert 0 < found["errors"]["grouped_outer float32"]["error"] < 1e-5
    assert 1e-4 < found["errors"]["grouped_outer bfloat16"]["error"] < 3e-2


def test_an_operation_that_is_wrong_fails_with_a_sentence(monkeypatch):
    target = operation(monkeypatch, wrong).target
    found = check_operations(target, SMALL, ["float32"], ["gram_polynomial"])
    assert found["failed"] == "gram_polynomial by wrong in float32 has error 0.1, tolerance 0.001."


def test_a_kernel_that_refuses_a_dtype_is_named_and_the_reference_is_checked(monkeypatch):
    target = operation(monkeypatch, wrong, right).target
    monkeypatch.setattr(registry, "_unsupported", lambda _operation, kernel, *_: "too wide" * (kernel.name == "wrong"))
    found = check_operations(target, SMALL, ["float32"], ["gram_polynomial"])
    assert found["refused"] == {"gram_polynomial by wrong float32": "too wide"}
    assert list(found["errors"]) == ["gram_polynomial by right float32"]
    monkeypatch.setattr(registry, "_unsupported", lambda *_: "too wide")
    found = check_operations(target, SMALL, ["float32"], ["gram_polynomial"])
    assert list(found["errors"]) == ["gram_polynomial float32"]
    assert "failed" not in found


@pytest.mark.soak
@pytest.mark.parametrize(("platform", "dtype"), [("cpu", "float32"), ("cpu", "bfloat16"), ("interpret", "float32")])
def test_all_operations_are_within_their_tolerances(platform, dtype):
    assert "failed" not in check_operations(kernels(platform).target, SMALL, [dtype])


@pytest.mark.soak
@pytest.mark.parametrize("name", WITH_KERNELS)
def test_each_kernel_emulated_is_right_also_where_rows_are_many(name):
    selection = KernelSelection(EMULATED, {name: "pallas"})
    for training in (True, False):
        assert validate_kernels(selection, SMALL, "bfloat16", training=training, large=2**19) == selection
