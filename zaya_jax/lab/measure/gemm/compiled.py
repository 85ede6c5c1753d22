"""Compile all problems for a GPU that need not be here, and predict their times."""

import itertools
import json
import operator
from typing import Any

from zaya_jax.config import Config
from zaya_jax.hardware.data_sheets import HARDWARE
from zaya_jax.lab.measure.gemm.gemm_sweep import Request, make_problems
from zaya_jax.lab.predict.compilers.compiled import check_gpu, run_worker
from zaya_jax.lab.predict.compilers.gpus import GPUS
from zaya_jax.lab.predict.compilers.hlo import entry_place, parse
from zaya_jax.lab.predict.compilers.predict import launches, predict
from zaya_jax.lab.predict.compilers.toolchain import find_toolchain, program_files, silence_plugins
from zaya_jax.lab.result import describe_run, print_tables
from zaya_jax.ops.registry import select_kernels
from zaya_jax.run.table import make_table, quantity


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
    problems = make_problems(
        config, request, select_kernels(GPUS[gpu].target, config.model, request.dtype, None, config.ops)
    )
    result = describe_run("compiled matrix products", f"{request.dtype}, a micro-batch of {request.tokens:,} tokens, "
                          f"{gpu}", "", (f"jax-{'cuda12-plugin' if GPUS[gpu].platform == 'cuda' else 'rocm7-pjrt'}",)
                          ) | {"results": []}  # fmt: skip
    words, failure = json.dumps(request._asdict()), f"The products cannot be compiled for {gpu}"
    with run_worker("products", gpu, (words,), failure, config) as folder:
        for index, problem in enumerate(problems):
            entry = entry_place(parse(program_files(folder, program_name(index))[0].read_text(encoding="utf-8")))
            result["results"].append({
                "family": problem.family, "name": problem.name, **problem.sizes, "flops": problem.flops,
                "launches": launches(entry),
                "predicted_flops_per_second": problem.flops / predict(entry, HARDWARE[gpu]).seconds,
            })  # fmt: skip
    columns = {"product": "name", "GFLOP": quantity("flops", unit=1e9), "launches": "launches",
               "predicted TFLOP/s": quantity("predicted_flops_per_second", unit=1e12)}  # fmt: skip
    families = itertools.groupby(result["results"], operator.itemgetter("family"))
    print_tables(make_table(family, list(rows), columns) for family, rows in families)
    return result
