"""Measure all problems, or compile them for a GPU that need not be here; print a table for each family."""

import itertools
import json
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from zaya_jax.config import Config
from zaya_jax.hardware.data_sheets import HARDWARE
from zaya_jax.lab.kernel_cases import drawn
from zaya_jax.lab.measure.gemm import problems
from zaya_jax.lab.measure.timing import time_calls
from zaya_jax.lab.predict.compilers.compiled import check_gpu, run_worker
from zaya_jax.lab.predict.compilers.gpus import GPUS
from zaya_jax.lab.predict.compilers.hlo import entry_place, parse
from zaya_jax.lab.predict.compilers.kernels import program_files
from zaya_jax.lab.predict.compilers.predict import launches, predict
from zaya_jax.lab.predict.compilers.toolchain import find_toolchain, silence_plugins
from zaya_jax.lab.report.tables import TABLES
from zaya_jax.lab.result import describe_run, print_tables
from zaya_jax.model.experts import rows_per_token
from zaya_jax.ops.registry import KernelSelection, select_kernels
from zaya_jax.ops.target import current_target
from zaya_jax.run.progress import track
from zaya_jax.run.table import make_table, quantity


class Request(NamedTuple):
    """A request for measurements of products."""

    families: Sequence[str]  # of `commands.FAMILIES`; 'square', which gives the maximum, is always measured, and first
    dtype: str  # 'bfloat16' or 'float32', of the operands
    squares: Sequence[int]  # sizes of the square matrices
    lengths: Sequence[int]  # tokens of a row of attention
    tokens: int  # of a micro-batch on one device
    routing: str | None  # folder of a run whose expert counts to use besides even ones; None for none
    flush: int  # bytes that are overwritten before a cold call
    repeats: int  # number of timed calls


def measure_gemm(config: Config, request: Request) -> dict[str, Any]:
    """Measure the first device of this process.

    Returns:
      The result, for JSON: `maximum`, FLOP/s of the fastest square, and a row for each problem.

    Raises:
      InputError: `routing` has no counts for this configuration.
    """
    kernels = select_kernels(current_target(), config.model, request.dtype, None, config.ops)
    every = make_problems(config, request, kernels)
    result = describe_run("matrix products", f"{request.dtype}, a micro-batch of {request.tokens:,} tokens", "", ())
    result["hardware"]["device"], result["results"] = jax.devices()[0].device_kind, []
    result["dtype"] = request.dtype
    flush = jnp.zeros(max(1, request.flush // 4), jnp.float32)
    for problem in track("measuring", every, lambda problem: f"{problem.family} {problem.name}"):
        try:
            seconds = time_problem(problem, flush, request.repeats)
            outcome = {f"{name}_flops_per_second": problem.flops / time for name, time in seconds.items()}
        except jax.errors.JaxRuntimeError as error:  # such as too little memory: the others can still be measured
            print(f"{problem.family} {problem.name} failed: {str(error).splitlines()[0]}")
            outcome = {"failed": str(error)}
        result["results"].append(problem.row | outcome)
    squares = (row for row in result["results"] if row["family"] == "square")
    result["maximum"] = max((row.get("warm_flops_per_second", 0.0) for row in squares), default=0.0)
    print_tables(TABLES["gemm"](result))
    return result


def make_problems(config: Config, request: Request, kernels: KernelSelection) -> list[problems.Problem]:
    """Make all problems of a request, squares first; raises like `measure_gemm`."""
    model, dtype, tokens = config.model, request.dtype, request.tokens
    routed = tokens * rows_per_token(model)
    histograms = {"even": problems.scale_counts(np.ones(model.num_experts), routed)}
    if request.routing is not None:
        histograms |= problems.read_histograms(request.routing, model.num_experts, routed)
    made = {
        "square": lambda: problems.squares(request.squares, dtype),
        "stride": lambda: problems.strides(model, tokens, dtype),
        "model": lambda: problems.model_products(model, tokens, dtype),
        "experts": lambda: problems.expert_products(model, histograms, kernels, dtype),
        "newton_schulz": lambda: problems.newton_schulz(model, config.optimizer.muon, kernels),
        "attention": lambda: problems.attention(model, request.lengths, tokens, kernels, dtype),
    }
    return [problem for family, make in made.items() if family in ("square", *request.families) for problem in make()]


def time_problem(problem: problems.Problem, flush: jax.Array, repeats: int) -> dict[str, float]:
    """Return the median seconds of a call with its operands in the caches, `warm`, and after `flush` replaced them."""
    arguments = jax.block_until_ready((*drawn(problem.arrays), *map(jnp.asarray, problem.integers)))
    call, overwrite = jax.jit(problem.run), jax.jit(lambda x: x + 1)

    def one_call() -> None:
        jax.block_until_ready(call(*arguments))

    cold = time_calls(one_call, repeats, before=lambda: overwrite(flush).block_until_ready())
    return {"warm": time_calls(one_call, repeats).median, "cold": cold.median}


def program_name(index: int) -> str:
    """Name the compiled program of a problem."""
    return f"product_{index}"


def compile_gemm(config: Config, request: Request, gpu: str) -> dict[str, Any]:
    """Compile the problems of a request for `gpu`, a name in `GPUS`, and print what the compiler makes of each.

    Returns:
      The result, for JSON: a row for each problem, with its launches and the predicted speed.

    Raises:
      InputError: there is no compiler for the GPU, or it refuses a program; or `request.routing` has no counts.
    """
    check_gpu(gpu)
    find_toolchain(gpu)
    silence_plugins()
    kernels = select_kernels(GPUS[gpu].target, config.model, request.dtype, None, config.ops)
    plugin = "jax-cuda12-plugin" if GPUS[gpu].platform == "cuda" else "jax-rocm7-pjrt"
    size = f"{request.dtype}, a micro-batch of {request.tokens:,} tokens, {gpu}"
    result = describe_run("compiled matrix products", size, "", (plugin,)) | {"results": []}
    words, failure = json.dumps(request._asdict()), f"The products cannot be compiled for {gpu}"
    with run_worker("products", gpu, (words,), failure, config) as folder:
        for index, problem in enumerate(make_problems(config, request, kernels)):
            entry = entry_place(parse(program_files(folder, program_name(index))[0].read_text(encoding="utf-8")))
            speed = problem.flops / predict(entry, HARDWARE[gpu]).seconds
            outcome = {"launches": launches(entry), "predicted_flops_per_second": speed}
            result["results"].append(problem.row | outcome)
    columns = {"product": "name", "GFLOP": quantity("flops", unit=1e9), "launches": "launches"}
    columns |= {"predicted TFLOP/s": quantity("predicted_flops_per_second", unit=1e12)}
    families = itertools.groupby(result["results"], operator.itemgetter("family"))
    print_tables(make_table(family, list(rows), columns) for family, rows in families)
    return result
