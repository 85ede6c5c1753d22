"""Matrix products: FLOPs, the products of a model, the command's result, and input."""

import json

import chex
import jax
import numpy as np
import pytest

from tests.helpers import random_values
from zaya_jax.config import load_config
from zaya_jax.lab.measure import gemm as module
from zaya_jax.lab.measure.commands import FAMILIES
from zaya_jax.lab.measure.gemm import Request, make_problems, time_problem
from zaya_jax.machine.__main__ import main
from zaya_jax.ops.grouped_matmul import grouped_matmul
from zaya_jax.ops.registry import select_kernels
from zaya_jax.ops.target import current_target

TINY = load_config("configs/tiny.yaml")
REQUEST = Request(FAMILIES, "float32", [24, 40], [16, 64], 64, 4096, 1)


def made(family):
    kernels = select_kernels(current_target(), TINY.model, "float32")
    return [problem for problem in make_problems(TINY, REQUEST, kernels) if problem.family == family]


@pytest.mark.parametrize("family", ["square", "stride", "model"])
def test_the_flops_of_dense_products_are_those_of_the_program(family):
    for problem in made(family):
        cost = jax.jit(problem.run).lower(*problem.arrays).cost_analysis()
        np.testing.assert_allclose(cost["flops"], problem.flops, err_msg=problem.name)


def test_a_layer_has_each_matrix_of_the_model():
    """All matrices that a token passes, but the convolutions' first taps, are weights of the listed products."""
    model = TINY.model
    weights = sum(int(np.prod(problem.arrays[1].shape)) for problem in made("model") if "forward" in problem.name)
    experts = sum(int(np.prod(problem.arrays[1].shape)) for problem in made("experts") if "forward" in problem.name)
    values = {name: x.shape for name, x in random_values(model).items()}
    layer = {name: np.prod(shape[1:]) for name, shape in values.items() if name.startswith("blocks.0.")}
    expected = sum(size for name, size in layer.items() if any(part in name for part in (
        ".query", ".key", ".value", "attention.output", "router.down", "hidden", "router.output"))
        and "bias" not in name and len(values[name]) == 3)  # fmt: skip
    heads, c = model.num_query_heads + model.num_kv_heads, model.head_dim
    hidden = model.router_size**2  # listed once for both hidden layers
    head = model.vocab_size * model.hidden_size
    assert weights == expected - hidden + heads * c * c + head
    assert experts == sum(size for name, size in layer.items() if ".experts." in name)


def test_gradients_of_experts_are_those_of_the_product():
    rng = np.random.default_rng(0)
    x, w, y = (rng.normal(size=shape).astype(np.float32) for shape in ((12, 8), (3, 8, 5), (12, 5)))
    sizes = np.array([5, 0, 7], np.int32)
    dx, dw = module._gradient(grouped_matmul, x, w, y, sizes)
    ends = np.cumsum(sizes)
    groups = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    chex.assert_trees_all_close(dx, np.concatenate([y[at] @ w[e].T for e, at in enumerate(groups)]), rtol=1e-5)
    chex.assert_trees_all_close(dw, np.stack([x[at].T @ y[at] for at in groups]), rtol=1e-5, atol=1e-6)


def test_the_command_measures_all_families(tmp_path, monkeypatch, capsys):
    timed = []

    def time_once(problem, flush, repeats):  # one problem of each family, since each is compiled
        assert (flush.nbytes, repeats) == (2**16, 1)
        if problem.family not in timed:
            timed.append(problem.family)
            return time_problem(problem, flush, repeats)
        return {"warm": 1e-6, "cold": 2e-6}

    monkeypatch.setattr(module, "time_problem", time_once)
    output, png = tmp_path / "gemm.json", tmp_path / "gemm.png"
    flags = ["configs/tiny.yaml", "--dtype", "float32", "--squares", "16", "48", "16", "--lengths", "16", "32",
             "--tokens", "32", "--flush", "64K", "--repeats", "1"]  # fmt: skip
    assert main(["gemm", *flags, "--output", str(output), "--png", str(png)]) == 0
    result = json.loads(output.read_text())
    assert list(dict.fromkeys(row["family"] for row in result["results"])) == timed == list(FAMILIES)
    assert all(row["cold_flops_per_second"] > 0 for row in result["results"])
    assert result["results"][1]["warm_flops_per_second"] == pytest.approx(2 * 32**3 / 1e-6)
    assert [row["size"] for row in result["results"] if row["family"] == "square"] == [16, 32, 48]
    names = [row["name"] for row in result["results"] if row["family"] == "experts"]
    assert names == [f"{layer}, even, {side}" for layer in ("gate and up", "down") for side in ("forward", "gradients")]
    assert result["maximum"] == max(
        row["warm_flops_per_second"] for row in result["results"] if row["family"] == "square"
    )
    assert png.read_bytes()[:4] == b"\x89PNG"
    assert "of maximum" in capsys.readouterr().out


@pytest.mark.parametrize(("arguments", "message"), [
    ("--squares 8 4 1", "--squares is 8 4 1, but must be FIRST ≤ LAST and a STEP, all at least 1."),
    ("--lengths 0", "--lengths is 0, but must be at least 1."),
    ("--tokens 0", "--tokens is 0, but must be at least 1."),
])  # fmt: skip
def test_bad_input_is_named(arguments, message, capsys):
    assert main(["gemm", "configs/tiny.yaml", *arguments.split()]) == 2
    assert message in capsys.readouterr().err
