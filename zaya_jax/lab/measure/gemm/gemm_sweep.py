"""Measure all problems, print a table for each family, and plot."""

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from zaya_jax.config import Config
from zaya_jax.lab.kernel_cases import drawn
from zaya_jax.lab.measure.gemm import problems
from zaya_jax.lab.report.tables import TABLES
from zaya_jax.lab.result import describe_run, print_tables
from zaya_jax.lab.timing import elapsed
from zaya_jax.model.experts import rows_per_token
from zaya_jax.ops.registry import KernelSelection, select_kernels
from zaya_jax.ops.target import current_target
from zaya_jax.run.progress import track


class Request(NamedTuple):
    """A request for measurements of products."""

    families: Sequence[str]  # of `command.FAMILIES`; 'square', which gives the maximum, is always measured, and first
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
        row = {"family": problem.family, "name": problem.name, **problem.sizes, "flops": problem.flops}
        try:
            seconds = time_problem(problem, flush, request.repeats)
        except jax.errors.JaxRuntimeError as error:  # such as too little memory: the others can still be measured
            print(f"{problem.family} {problem.name} failed: {str(error).splitlines()[0]}")
            result["results"].append(row | {"failed": str(error)})
            continue
        speeds = {f"{name}_flops_per_second": problem.flops / time for name, time in seconds.items()}
        result["results"].append(row | speeds)
    squares = (row for row in result["results"] if row["family"] == "square")
    result["maximum"] = max((row.get("warm_flops_per_second", 0.0) for row in squares), default=0.0)
    print_tables(TABLES["gemm"](result))
    return result


def make_problems(config: Config, request: Request, kernels: KernelSelection) -> list[problems.Problem]:
    """Make all problems of a request, squares first; raises like `measure_gemm`."""
    model, dtype = config.model, request.dtype
    routed = request.tokens * rows_per_token(model)
    histograms = {"even": problems.scale_counts(np.ones(model.num_experts), routed)}
    if request.routing is not None:
        histograms |= problems.read_histograms(request.routing, model.num_experts, routed)
    made = {
        "square": lambda: problems.squares(request.squares, dtype),
        "stride": lambda: problems.strides(model, request.tokens, dtype),
        "model": lambda: problems.model_products(model, request.tokens, dtype),
        "experts": lambda: problems.expert_products(model, histograms, kernels, dtype),
        "newton_schulz": lambda: problems.newton_schulz(model, config.optimizer.muon, kernels),
        "attention": lambda: problems.attention(model, request.lengths, request.tokens, kernels, dtype),
    }
    return [problem for family, make in made.items() if family in ("square", *request.families) for problem in make()]


def time_problem(problem: problems.Problem, flush: jax.Array, repeats: int) -> dict[str, float]:
    """Time calls in turn with the operands in the caches (`warm`) and after an update of `flush` overwrote those.

    Returns:
      Median seconds of a call, warm and `cold`. The first call of each, which compiles, is left out.
    """
    arguments = jax.block_until_ready((*drawn(problem.arrays), *map(jnp.asarray, problem.integers)))
    call, overwrite = jax.jit(problem.run), jax.jit(lambda x: x + 1)
    warm, cold = [], []

    def one_call() -> None:
        jax.block_until_ready(call(*arguments))

    for _ in range(repeats + 1):
        one_call()  # loads the caches
        warm.append(elapsed(one_call))
        overwrite(flush).block_until_ready()
        cold.append(elapsed(one_call))
    return {"warm": statistics.median(warm[1:]), "cold": statistics.median(cold[1:])}
