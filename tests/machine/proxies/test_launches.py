import json

import pytest

from zaya_jax.machine.__main__ import main
from zaya_jax.machine.proxies import launches as bench
from zaya_jax.machine.proxies.codegen import lower
from zaya_jax.machine.proxies.kernel_bytes import Traffic, kernel_bytes
from zaya_jax.machine.proxies.kernel_cases import EIGHT_B, SMALL, cases, passes
from zaya_jax.machine.proxies.launches import (
    KERNELS,
    LAYER,
    REFERENCES,
    TARGET,
    bench_launches,
    layer_launches,
    operation_bytes,
    told,
)
from zaya_jax.machine.proxies.stablehlo import Launches, count_launches

FORWARD = {"cca_mix": 1, "attention": 1, "residual_norm_forward": 1, "grouped_swiglu": 1, "grouped_product": 1}


@pytest.mark.soak
def test_a_layer_launches_each_kernel_once_and_fewer_products():
    found = layer_launches(LAYER, 4096, KERNELS, backward=False)
    assert dict(found.kernels) == FORWARD
    assert not found.loops
    before = layer_launches(LAYER, 4096, REFERENCES, backward=False)
    assert not before.kernels
    assert before.total + sum(before.in_loops) > found.total
    assert before.loops  # attention's over queries and, within it, over keys; the experts' over blocks of rows
    # The mix's is in a kernel; projections, router and output remain.
    assert before.products - found.products == 1


@pytest.mark.soak
def test_the_backward_pass_does_not_attend_again():
    found = layer_launches(LAYER, 4096, KERNELS, backward=True)
    assert found.kernels["attention"] == 1
    assert found.kernels["grouped_swiglu"] == 1
    for name in ("attention_backward_keys", "attention_backward_queries", "residual_norm_backward", "cca_mix_backward"):
        assert found.kernels[name] == 1
    before = layer_launches(LAYER, 4096, REFERENCES, backward=True)
    assert before.total > found.total


def test_bytes_are_those_of_kernels_and_of_what_stands_around_them():
    every = cases(SMALL, "bfloat16")
    found, (forward, backward) = operation_bytes("residual_norm backward", every["residual_norm backward"], every)
    assert found["least"] == every["residual_norm"].bytes + every["residual_norm backward"].bytes
    assert (forward.name, backward.name) == ("residual_norm_forward", "residual_norm_backward")
    kernels = found["kernels"]
    assert kernels["launches"]["kernels"] == {"residual_norm_forward": 1, "residual_norm_backward": 1}
    assert kernels["bytes"] > forward.moved + backward.moved  # the sums of partial sums
    assert kernels["ratio"] == round(kernels["bytes"] / found["least"], 3)
    assert found["references"]["bytes"] > found["least"]
    assert not found["references"]["launches"]["kernels"]


@pytest.mark.parametrize("iterates", ["bfloat16", pytest.param("float32", marks=pytest.mark.soak)])
def test_momentum_and_cast_are_one_pass_and_the_norm_reads_what_it_wrote(iterates):
    every = cases(EIGHT_B._replace(matrices=(2, 128, 512)), iterates)
    elements, item = 2 * 128 * 512, {"bfloat16": 2, "float32": 4}[iterates]
    (momentum,) = kernel_bytes(*flat(passes(every["momentum"], KERNELS)))
    launches = count_launches(lower(*flat(passes(every["muon"], KERNELS)), target=TARGET))
    assert dict(launches.kernels) == {"momentum": 1}
    (loop,) = launches.loops
    assert dict(loop.kernels) == {"gram": 1, "gram_polynomial": 1}
    least = (12 + item) * elements
    update = (4 + item + 4) * elements  # parameters and directions read, parameters written
    assert every["momentum"].bytes == least + 24
    assert momentum.moved <= 1.01 * least
    norm = launches.bytes - update
    assert item * elements <= norm <= 1.01 * item * elements
    if iterates == "bfloat16":
        assert momentum.moved + norm <= 1.2 * least


def flat(made):
    return made[0], *made[1]


@pytest.mark.soak
@pytest.mark.parametrize("name", ["residual_norm", "residual_norm backward", "cca_mix", "cca_mix backward", "momentum"])
def test_bytes_are_at_most_a_fifth_more_than_the_least(name):
    every = cases(bench.WALKED, "bfloat16")
    found, _ = operation_bytes(name, every[name], every)
    assert 1 <= found["kernels"]["ratio"] <= 1.2


@pytest.mark.soak
def test_loops_of_unknown_length_have_no_bytes():
    every = cases(SMALL, "bfloat16")
    found, _ = operation_bytes("attention of a decode", every["attention of a decode"], every)
    assert found["references"]["ratio"] is None
    assert found["kernels"]["ratio"] >= 1


def test_the_result_holds_layer_operations_and_kernels(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench, "layer_launches", lambda model, tokens, kernels, *, backward: Launches(products=2)
                        if kernels.chosen else Launches(products=3, loops=[Launches(fusions=5)]))  # fmt: skip
    monkeypatch.setattr(bench, "cases", lambda sizes, dtype: {"norm": None})
    sides = {side: {"launches": told(Launches()), "bytes": 3, "ratio": ratio} for side, ratio in
             (("references", None), ("kernels", 1.5))}  # fmt: skip
    monkeypatch.setattr(bench, "operation_bytes", lambda *_: ({"least": 2, **sides}, [Traffic("k", 1, 9, 3, 2)]))
    path = tmp_path / "launches.json"
    assert main(["launches", "--output", str(path)]) == 0
    found = json.loads(path.read_text())
    assert found["layer"]["forward"]["references"]["total"] == 3
    assert found["layer"]["forward"]["references"]["in_loops"] == [5]
    assert found["operations"]["norm"]["kernels"]["ratio"] == 1.5
    assert found["kernels"]["k"]["ratio"] == 1.5
    out = capsys.readouterr().out
    assert "Launches of a layer, forward: 3 with references (and 5 per iteration of its loops), 2 with kernels" in out
    assert "norm: bytes moved / minimum 1.50 with kernels, unknown (loops) with references" in out


@pytest.mark.soak
def test_small_sizes_can_be_counted(tmp_path):
    sizes = EIGHT_B._replace(tokens=64, sequence=64, mixed=32, width=256, experts=2, per_expert=32, expert_width=256,
                             matrices=(1, 256, 128), decoded=(1, 128))  # fmt: skip
    found = bench_launches(str(tmp_path / "launches.json"), sizes)
    assert found["operations"].keys() == cases(SMALL, "bfloat16").keys()
