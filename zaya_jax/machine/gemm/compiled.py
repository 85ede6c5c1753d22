"""Compile all problems for a GPU that need not be here, and predict their times."""

import functools
import tempfile
from pathlib import Path
from typing import Any

from zaya_jax.config import Config
from zaya_jax.hardware.data_sheets import HARDWARE
from zaya_jax.machine.compilers.compiled import check_gpu, run_worker
from zaya_jax.machine.compilers.cross_compile import compile_program, load_compiler, program_files
from zaya_jax.machine.compilers.gpus import GPUS
from zaya_jax.machine.compilers.hlo import entry_place, parse
from zaya_jax.machine.compilers.kernels import CompiledProgram
from zaya_jax.machine.compilers.predict import predict
from zaya_jax.machine.compilers.toolchain import environment, find_toolchain, silence_plugins
from zaya_jax.machine.gemm.sweep import Request, make_problems
from zaya_jax.machine.result import describe_run
from zaya_jax.ops.registry import select_kernels


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
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        work = functools.partial(write_products, config, request, gpu, folder)
        run_worker(work, environment(gpu, folder, config.measurements), f"The products cannot be compiled for {gpu}")
        family = ""
        for index, problem in enumerate(problems):
            if problem.family != family:
                family = problem.family
                print(f"\n{family:<52}{'GFLOP':>10}{'launches':>10}{'predicted TFLOP/s':>19}")
            text = program_files(folder, f"product_{index}")[0].read_text(encoding="utf-8")
            program = CompiledProgram(entry_place(parse(text)), [])
            speed = problem.flops / predict(program.entry, HARDWARE[gpu]).seconds
            result["results"].append({
                "family": family, "name": problem.name, **problem.sizes, "flops": problem.flops,
                "launches": program.launches, "predicted_flops_per_second": speed,
            })  # fmt: skip
            print(f"{problem.name:<52}{problem.flops / 1e9:>10,.3g}{program.launches:>10}{speed / 1e12:>19,.4g}")
    return result


def write_products(config: Config, request: Request, gpu: str, folder: Path) -> dict[str, Any]:
    """Compile the products in a process with the environment of the GPU's compiler, and write them into `folder`."""
    load_compiler(gpu)
    kernels = select_kernels(GPUS[gpu].target, config.model, request.dtype)
    for index, problem in enumerate(make_problems(config, request, kernels)):
        compile_program(f"product_{index}", problem.run, (*problem.arrays, *problem.integers), gpu, folder)
    return {}
