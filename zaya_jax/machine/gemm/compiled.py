"""Compile all problems for a GPU that need not be here, and predict their times."""

import dataclasses
import json
from typing import Any

from zaya_jax.config import Config
from zaya_jax.hardware.data_sheets import HARDWARE
from zaya_jax.machine.compilers.compiled import check_gpu, run_worker
from zaya_jax.machine.compilers.gpus import GPUS
from zaya_jax.machine.compilers.hlo import entry_place, parse
from zaya_jax.machine.compilers.kernels import CompiledProgram, program_files
from zaya_jax.machine.compilers.predict import predict
from zaya_jax.machine.compilers.toolchain import find_toolchain, silence_plugins
from zaya_jax.machine.gemm.sweep import Request, make_problems
from zaya_jax.machine.result import describe_run
from zaya_jax.ops.registry import select_kernels


def program_name(index: int) -> str:
    """Name the program of a problem."""
    return f"product_{index}"


def compile_gemm(config: Config, request: Request, gpu: str) -> dict[str, Any]:
    """Compile the problems of a request, and print and return what the compiler makes of each.

    Args:
      config: its model and optimizer.
      request: what to compile.
      gpu: name in `GPUS`.

    Returns:
      The result, for JSON: a row for each problem, with its launches and the predicted speed.

    Raises:
      InputError: there is no compiler for the GPU, or it refuses a program; or `request.routing` has no counts.
    """
    check_gpu(gpu)
    find_toolchain(gpu)
    silence_plugins()
    problems = make_problems(config, request, select_kernels(GPUS[gpu].target, config.model, request.dtype))
    result = describe_run("compiled matrix products", f"{request.dtype}, a micro-batch of {request.tokens:,} tokens, "
                          f"{gpu}", "", (f"jax-{'cuda12-plugin' if GPUS[gpu].platform == 'cuda' else 'rocm7-pjrt'}",)
                          ) | {"results": []}  # fmt: skip
    words = json.dumps(dataclasses.asdict(dataclasses.replace(request, squares=list(request.squares))))
    with run_worker("products", gpu, (words,), f"The products cannot be compiled for {gpu}", config) as folder:
        family = ""
        for index, problem in enumerate(problems):
            if problem.family != family:
                family = problem.family
                print(f"\n{family:<52}{'GFLOP':>10}{'launches':>10}{'predicted TFLOP/s':>19}")
            text = program_files(folder, program_name(index))[0].read_text(encoding="utf-8")
            program = CompiledProgram(entry_place(parse(text)), [])
            speed = problem.flops / predict(program.entry, HARDWARE[gpu]).seconds
            result["results"].append({
                "family": family, "name": problem.name, **problem.sizes, "flops": problem.flops,
                "launches": program.launches, "predicted_flops_per_second": speed,
            })  # fmt: skip
            print(f"{problem.name:<52}{problem.flops / 1e9:>10,.3g}{program.launches:>10}{speed / 1e12:>19,.4g}")
    return result
