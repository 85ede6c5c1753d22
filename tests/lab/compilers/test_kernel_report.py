"""The verb `kernels`, with programs that nothing compiled."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zaya_jax.errors import InputError
from zaya_jax.lab.predict.compilers import kernels as module
from zaya_jax.lab.predict.compilers.gpus import GPUS
from zaya_jax.lab.predict.compilers.hlo import parse
from zaya_jax.lab.predict.compilers.kernels import CompiledProgram, requested
from zaya_jax.lab.predict.compilers.resources import KernelResources, resource_cells, waves_per_simd
from zaya_jax.machine.__main__ import main

# Two launches, one of them in a loop: 3 × 256 and 2 × 256 bytes each time.
TEXT = """\
HloModule jit_case, is_scheduled=true

%body (arg: f32[64]) -> f32[64] {
  %arg = f32[64]{0} parameter(0)
  ROOT %inner = f32[64]{0} copy(%arg)
}

ENTRY %main (p0: f32[64]) -> f32[64] {
  %p0 = f32[64]{0} parameter(0)
  %call = (f32[64]{0}) custom-call(%p0, %p0), custom_call_target="__gpu$xla.gpu.triton", metadata={op_name="jit(case)/mix/pallas_call"}
  %first = f32[64]{0} get-tuple-element(%call), index=0, metadata={op_name="jit(case)/mix/pallas_call"}
  ROOT %loop = f32[64]{0} while(%first), condition=%c, body=%body TRIPS
}
"""  # noqa: E501
COUNTED = ', backend_config={"known_trip_count":{"n":"5"}}'
KERNEL = KernelResources("attention", 77, 12, 0, 16, 2048, 128)


def program(trips):
    return CompiledProgram(parse(TEXT.replace(" TRIPS", trips)), [KERNEL])


def test_launches_and_bytes_of_a_loop_count_as_often_as_it_runs():
    assert (program(COUNTED).launches, program(COUNTED).bytes, program(COUNTED).counted) == (6, 3 * 256 + 5 * 512, True)
    assert (program("").launches, program("").bytes, program("").counted) == (2, 3 * 256 + 512, False)


def test_the_verb_prints_a_table_and_writes_a_file(monkeypatch, tmp_path, capsys):
    def compile_cases(gpu, request):
        return {(dtype, case, side): program(COUNTED if side == "kernels" else "")
                for _, dtype, case, side, _ in requested(request)}  # fmt: skip

    monkeypatch.setattr(module, "compile_cases", compile_cases)
    monkeypatch.setattr(module, "find_toolchain", lambda name: None)
    path = tmp_path / "kernels.json"
    assert main(["kernels", "--compile-for", "h200", "--output", str(path)]) == 0
    (found,) = json.loads(path.read_text(encoding="utf-8"))["gpus"].values()
    assert found["cases"][0]["kernels"] == {"launches": 6, "bytes": 3 * 256 + 5 * 512, "counted": True}
    assert found["cases"][0]["references"]["counted"] is False
    assert found["kernels"] == [{"dtype": dtype, **KERNEL._asdict()} for dtype in ("bfloat16", "float32")]
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["attention", "bfloat16", "77", "2.0", "12", "16", "128"] in lines
    assert lines[2][:3] == ["residual_norm", "bfloat16", "6,"]
    assert "2+," in lines[2]


def test_a_missing_compiler_is_an_error_with_the_command_that_installs_it(monkeypatch, capsys):
    def find_toolchain(name):
        raise InputError("No.")

    monkeypatch.setattr(module, "find_toolchain", find_toolchain)
    assert main(["kernels"]) == 2
    assert "pip install 'zaya-jax[compile-cuda]'" in capsys.readouterr().err


def test_an_unknown_gpu_is_an_error(capsys):
    assert main(["kernels", "--compile-for", "h300"]) == 2
    assert "must be one of h100, h200, mi300x, mi355x" in capsys.readouterr().err


@settings(max_examples=200)
@given(gpu=st.sampled_from(["mi300x", "mi355x"]), registers=st.integers(1, 512) | st.integers(1, 64),
       scalars=st.integers(1, 112), granules=st.integers(0, 4) | st.integers(0, 128),
       log_waves=st.integers(0, 3))  # fmt: skip
def test_as_many_waves_run_as_registers_and_shared_memory_allow(gpu, registers, scalars, granules, log_waves):
    waves, unit = 2**log_waves, {"mi300x": 512, "mi355x": 1280}[gpu]  # LLVM's granule of shared memory
    kernel = KERNEL._replace(registers=registers, scalars=scalars, shared=granules * unit, threads=64 * waves)

    def fits(blocks):
        on_simd = -(-blocks * waves // 4)
        return (on_simd <= 8 and on_simd * -(-registers // 8) * 8 <= 512 and on_simd * -(-scalars // 16) * 16 <= 800
                and blocks * granules <= 128)  # fmt: skip

    found, limit = waves_per_simd(kernel, GPUS[gpu])
    blocks = found * 4 / waves
    assert blocks == int(blocks)
    assert fits(int(blocks))
    assert not fits(int(blocks) + 1)
    assert limit in {"waves", "vector registers", "scalar registers", "shared memory"}


@pytest.mark.parametrize(
    ("change", "waves"),
    [
        ({}, "4, vector registers"),
        ({"registers": 129}, "3, vector registers"),
        ({"registers": 72}, "7, vector registers"),
        ({"registers": 32}, "8, waves"),
        ({"registers": 32, "scalars": 97}, "7, scalar registers"),
        ({"shared": 32768}, "2, shared memory"),
    ],
)
def test_the_table_says_what_limits_the_waves(change, waves):
    kernel = KERNEL._replace(**{"registers": 128, "scalars": 96, "threads": 256, **change})
    assert resource_cells(kernel, "mi300x")[-1] == waves
    assert resource_cells(kernel, "h200")[-1] == "256"


def test_only_names_choose_the_cases():
    names = [name for name, *_ in requested(module.Request(("float32",), ("kernels",), ("muon",)))]
    assert names == ["kernels_float32_muon"]
