import json
import re

import jax
import numpy as np
import pytest

from tests.kernel_helpers import kernel_names, kernels, lower
from tests.train_helpers import ROOT
from zaya_jax.config import load_config
from zaya_jax.lab.kernel_cases import EIGHT_B, SMALL, cases, passes, program
from zaya_jax.lab.predict.compilers.gpus import GPUS
from zaya_jax.lab.predict.compilers.resources import KernelResources, waves_per_simd
from zaya_jax.ops.registry import OPERATIONS

KERNELS = {
    "residual_norm": ["residual_norm_forward"],
    "residual_norm backward": ["residual_norm_forward", "residual_norm_backward"],
    "cca_mix": ["cca_mix"],
    "cca_mix backward": ["cca_mix", "cca_mix_backward_norm", "cca_mix_backward_rows", "cca_mix_backward_matrices"],
    "attention": ["attention"],
    "attention backward": ["attention", "attention_backward_keys", "attention_backward_queries"],
    "attention of a decode": ["attention_decode", "attention_join"],
    "router": [],
    "router backward": [],
    "grouped_matmul": ["grouped_product"],
    "grouped_matmul backward": ["grouped_product", "grouped_product_transposed", "grouped_outer"],
    "experts": ["class_sort", "grouped_swiglu", "grouped_product"],
    "experts backward": ["class_sort", "grouped_swiglu", "grouped_product", "grouped_swiglu_backward", "grouped_outer",
                         "grouped_outer", "grouped_product_transposed"],
    "cca_mix of a decode": ["cca_mix_step"],
    "router of a decode": ["router_step"],
    "experts of a decode": ["class_sort", "grouped_swiglu", "grouped_product"],  # XLA drops the unused sort
    "gram_polynomial": ["gram", "gram_polynomial"],
    "muon": ["gram", "gram_polynomial"],
}  # fmt: skip


def test_the_sizes_are_the_8b_s():
    config = load_config(str(ROOT / "configs" / "zaya1_8b.yaml"), [])
    model = config.model
    assert EIGHT_B.width == model.hidden_size
    assert (EIGHT_B.query_heads, EIGHT_B.kv_heads) == (model.num_query_heads, model.num_kv_heads)
    assert (EIGHT_B.channels, EIGHT_B.channels // 2) == (model.head_dim, model.rotary_size)
    assert EIGHT_B.router == model.router_size
    assert (EIGHT_B.experts, EIGHT_B.expert_width) == (model.num_experts, model.expert_size)
    assert EIGHT_B.matrices == (model.num_experts, model.hidden_size, 2 * model.expert_size)
    assert EIGHT_B.mixed == config.phases[0].context
    assert EIGHT_B.tokens == EIGHT_B.experts * EIGHT_B.per_expert


def test_every_operation_that_has_a_kernel_has_a_case():
    found = cases(EIGHT_B, "bfloat16")
    measured = {operation for case in found.values() for operation in case.operations}
    # Parts of attention are its kernels with other outputs.
    assert measured >= {name for name, it in OPERATIONS.items() if it.kernels and "partial" not in name}
    assert found.keys() == KERNELS.keys()
    for name, case in found.items():
        assert case.backward == name.endswith(" backward")
        assert name.removesuffix(" backward") in found


def test_the_page_has_what_the_benchmark_recorded_of_these_kernels():
    gpus = json.loads((ROOT / "benchmarks" / "kernels_compiled.json").read_text(encoding="utf-8"))["gpus"]
    page = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8").replace("**", "")
    heads = "## Launches and bytes of an operation|## Registers and shared memory|### Tiles for AMD"
    _, cases_part, kernels_part, _ = re.split(heads, page)
    rows, kernels_rows = (
        re.findall(r"^\| `([\w ]+)` \| (.*) \|$", part, re.MULTILINE) for part in (cases_part, kernels_part)
    )
    assert [name for name, _ in rows] == list(KERNELS)
    recorded = {row["case"]: row for row in gpus["mi300x"]["cases"] if row["dtype"] == "bfloat16"}
    for name, cells in rows:
        row, figures = recorded[name], cells.replace("> ", "").replace(",", "").split(" | ")[1:]
        for side, multiple, launches in (("kernels", *figures[:2]), ("references", *figures[2:])):
            assert multiple == f"{row[side]['bytes'] / row['least_bytes']:.2f} ×"
            assert launches == str(row[side]["launches"])
    assert {name for name, _ in kernels_rows} == {name for launched in KERNELS.values() for name in launched}
    for name, cells in kernels_rows:
        expected = []
        for gpu, report in gpus.items():
            found = (row for row in report["kernels"] if (row["name"], row["dtype"]) == (name, "bfloat16"))
            variants = [KernelResources(**{key: row[key] for key in KernelResources._fields}) for row in found]
            registers, shared = (max(getattr(x, key) for x in variants) for key in ("registers", "shared"))
            expected += [f"{registers:.3g}", f"{shared / 1024:.3g}"]
            if GPUS[gpu].platform == "rocm":
                expected.append(f"{min(waves_per_simd(x, GPUS[gpu])[0] for x in variants):g}")
        assert cells.split(" | ") == expected


def test_the_work_is_what_the_definitions_say():
    found = cases(SMALL, "bfloat16")
    t, d = SMALL.tokens, SMALL.width
    assert found["residual_norm"].bytes == t * d * (2 + 4 + 4 + 2) + 5 * d * 4
    assert found["residual_norm backward"].bytes == t * d * (2 * (2 + 4) + 4 + 2) + 2 * 5 * d * 4
    h, c, s = SMALL.query_heads, SMALL.channels, SMALL.sequence
    seen = sum(key <= query for query in range(s) for key in range(s))
    assert found["attention"].flops == 2 * 2 * c * h * seen * (t // s)
    assert found["attention backward"].flops == 5 * 2 * c * h * seen * (t // s)
    rows, keys = SMALL.decoded
    assert found["attention of a decode"].flops == 2 * 2 * c * h * rows * keys
    e, f = SMALL.experts, SMALL.expert_width
    grouped = 2 * e * SMALL.per_expert * d * 2 * f
    assert [found[name].flops / grouped for name in ("grouped_matmul", "grouped_matmul backward")] == [1, 2]
    assert [found[name].flops / grouped for name in ("experts", "experts backward")] == [1.5, 3]
    n, p, q = SMALL.matrices
    assert found["gram_polynomial"].flops == n * (2 * p * p * q + 2 * p**3)
    assert found["muon"].flops == 5 * n * (2 * p * p * q + 2 * p**3 + 2 * p * p * q)


def test_experts_get_as_many_tokens_each_in_no_order():
    (expert,) = cases(SMALL, "bfloat16")["experts"].integers
    assert np.bincount(expert).tolist() == [SMALL.per_expert] * SMALL.experts
    assert (np.diff(expert) < 0).any()


@pytest.mark.parametrize(
    "name",
    [name if name == "residual_norm backward" else pytest.param(name, marks=pytest.mark.soak) for name in KERNELS],
)
def test_a_case_is_done_by_its_kernels_or_without(name):
    case = cases(EIGHT_B, "bfloat16")[name]
    for without, names in (((), KERNELS[name]), (case.operations, [])):
        function, arguments = passes(case, kernels("rocm").without(without))
        assert kernel_names(lower(function, *arguments, platform="rocm")) == names


def small(name, platform, dtype="float32"):
    function, arguments = program(cases(SMALL, dtype)[name], kernels(platform))
    return jax.jit(function)(*arguments)


@pytest.mark.parametrize(
    "name", [name if name == "gram_polynomial" else pytest.param(name, marks=pytest.mark.soak) for name in KERNELS]
)
def test_both_sides_do_the_same(name):
    found, wanted = (small(name, platform) for platform in ("interpret", "cpu"))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert one.dtype == other.dtype
        scale = np.abs(other).max() + 1e-30
        assert np.abs(one - other).max() <= 1e-3 * scale
        assert scale > 1e-12
