import contextlib
import json
from types import SimpleNamespace

import pytest

from benchmarks import __main__ as command
from benchmarks import kernels as bench
from zaya_jax.errors import InputError
from zaya_jax.lab.kernel_cases import SMALL, Case, cases
from zaya_jax.lab.measure import timing
from zaya_jax.lab.measure.timing import Passes
from zaya_jax.ops.target import Target

LIMITS = {"copy": 4e12, "dense": 800e12}


def a_case(flops=4e12, size=40e9):
    return Case("attention", None, (), flops, size)


def timed(*seconds, calls=10):
    return Passes([calls * one for one in seconds], [calls] * len(seconds))


def test_the_speed_is_that_of_the_median_call():
    passes = {"kernel": timed(0.02, 0.05, 0.01), "reference": timed(0.06, 0.06, 0.07), "peer": timed(0.01, 0.01, 0.03)}
    found = bench.row(a_case(), passes, {}, LIMITS)
    assert found["median_seconds"] == {"kernel": 0.02, "reference": 0.06, "peer": 0.01}
    assert (found["reference"], found["peer"]) == (3.0, 0.5)
    assert (found["bytes_per_second"], found["flops_per_second"]) == (2e12, 200e12)
    assert found["seconds"]["kernel"] == [0.02, 0.05, 0.01]


def test_the_roofline_is_what_takes_longer():
    for case, share in ((a_case(flops=16e12, size=1e9), 0.5), (a_case(flops=1e9, size=40e9), 0.25)):
        assert bench.row(case, {"kernel": timed(0.04)}, {}, LIMITS)["of_roofline"] == pytest.approx(share)


def test_a_side_that_is_missing_is_told():
    found = bench.row(a_case(), {"kernel": timed(0.02)}, {"reference": "It broke."}, LIMITS)
    assert "no reference: It broke." in bench.sentence(found)
    nothing = bench.row(a_case(), {"peer": timed(0.02)}, {"kernel": "It broke."}, LIMITS)
    assert bench.sentence(nothing) == "no kernel: It broke."


def test_a_row_is_a_sentence():
    passes = {"kernel": timed(0.02), "reference": timed(0.06), "peer": timed(0.03)}
    found = bench.row(a_case(), passes, {}, LIMITS)
    assert bench.sentence(found) == (
        "20 ms, 2,000 GB/s, 200 TFLOP/s; 3× as fast as XLA; 1.5× as fast as PyTorch; 50% of the roofline"
    )


def test_what_training_updates_in_place_is_timed_so(monkeypatch):
    found = []
    queue = SimpleNamespace(make_pass=lambda: None)
    monkeypatch.setattr(bench, "Queue", lambda function, arguments, held: found.append(held) or queue)
    bench.our_side("muon", SMALL, "bfloat16", False, False)
    assert found == [cases(SMALL, "bfloat16")["muon"].held] != [0]


def in_this_process(make, *arguments):
    return contextlib.nullcontext(make(*arguments))


@pytest.fixture
def sides(monkeypatch):
    """Sides that take no time to make: the kernel a second, the reference three, PyTorch is not there."""
    now, made = [0.0], []

    def side(seconds):
        def step():
            now[0] += seconds
            return 1

        return step

    def ours(name, sizes, dtype, kernel, emulated):
        made.append((name, sizes, dtype, kernel, emulated))
        return side(1.0 if kernel else 3.0)

    def peer(*_):
        raise InputError("The peer needs PyTorch.")

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(timing.time, "sleep", lambda _: None)
    monkeypatch.setattr(bench, "run_in_subprocess", in_this_process)
    monkeypatch.setattr(bench, "our_side", ours)
    monkeypatch.setattr(bench, "peer_side", peer)
    monkeypatch.setattr(timing, "run_in_subprocess", in_this_process)
    monkeypatch.setattr(bench, "roofline", lambda probe, sizes: side(1e-3))
    return made


def test_without_a_gpu_all_cases_are_emulated_at_small_size(sides, tmp_path, capsys):
    path = tmp_path / "kernels.json"
    assert command.main(["kernels", "--repeats", "3", "--output", str(path)]) == 0
    found = json.loads(path.read_text())
    assert found["emulated"] is True
    assert found["results"].keys() == cases(SMALL, "bfloat16").keys()
    assert {(sizes, emulated) for _, sizes, _, _, emulated in sides} == {(SMALL, True)}
    norm = found["results"]["residual_norm"]
    assert norm["median_seconds"] == {"kernel": 1.0, "reference": 3.0}
    assert norm["missing"] == {"peer": "The peer needs PyTorch."}
    assert found["results"]["cca_mix"]["missing"] == {"peer": "PyTorch has no counterpart."}
    assert found["rooflines"] == pytest.approx({"copy": 2 * 2**24 / 1e-3, "dense": 2 * 512**3 / 1e-3}, rel=1e-3)
    assert "do not compare these times with a GPU" in capsys.readouterr().out


def test_on_a_gpu_they_have_the_8b_s_sizes(sides, monkeypatch):
    monkeypatch.setattr(bench, "current_target", lambda: Target("cuda", "NVIDIA H200"))
    found = bench.bench_kernels(["residual_norm"], 1, None)
    assert found["results"].keys() == {"residual_norm"}
    assert not found["emulated"]
    assert {(sizes, emulated) for _, sizes, _, _, emulated in sides} == {(bench.EIGHT_B, False)}


def test_a_process_that_ends_in_a_timed_pass_costs_one_case(sides, monkeypatch, capsys):
    interleave = bench.interleave

    def ends_once(steps, repeats):
        if "kernel" in steps and len(sides) == 2:
            raise RuntimeError("The measured process exited with status -11.")
        return interleave(steps, repeats)

    monkeypatch.setattr(bench, "interleave", ends_once)
    assert command.main(["kernels", "--only", "residual_norm", "gram_polynomial"]) == 1
    assert "gram_polynomial: 1000 ms" in capsys.readouterr().out
    monkeypatch.setattr(bench, "interleave", interleave)
    assert command.main(["kernels", "--only", "residual_norm", "gram_polynomial"]) == 0


def test_a_device_without_kernels_does_not_fail(sides, monkeypatch):
    monkeypatch.setattr(bench, "current_target", lambda: Target("cuda", "NVIDIA A10", "sm_86"))
    monkeypatch.setattr(bench, "_selection", lambda *_: bench.KernelSelection(Target("cuda", "NVIDIA A10"), {}))
    monkeypatch.setattr(bench, "time_sides", lambda *_: ({}, {"kernel": "It has none."}))
    assert "failed" not in bench.bench_kernels(["residual_norm"], 1, None)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [(["--only", "attention", "norm"], "--only is 'norm'"), (["--repeats", "0"], "--repeats is 0")],
)
def test_what_cannot_be_measured_is_told_before_measuring(sides, capsys, arguments, match):
    assert command.main(["kernels", *arguments]) == 2
    assert match in capsys.readouterr().err
    assert not sides


@pytest.mark.soak
def test_everything_runs_on_a_cpu(tmp_path, monkeypatch):
    found = bench.bench_kernels([], 1, str(tmp_path / "kernels.json"))
    for name, row in found["results"].items():
        assert {"kernel", "reference"} <= row["median_seconds"].keys(), (name, row["missing"])
