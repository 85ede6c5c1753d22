"""Measure matrix products; print a table for each family."""

import functools
import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from zaya_jax.config import Config, ModelConfig, MuonConfig
from zaya_jax.lab.kernel_cases import PRODUCTS, drawn
from zaya_jax.lab.measure.timing import time_calls
from zaya_jax.lab.predict.sizing.rules import Product, products
from zaya_jax.lab.result import describe_run, print_tables
from zaya_jax.lab.result_tables import TABLES
from zaya_jax.model.experts import rows_per_token
from zaya_jax.model.layers import MATRIX_ROLES
from zaya_jax.model.loss import chunk_tokens
from zaya_jax.model.tree import fused, roles, shapes
from zaya_jax.model.zaya import abstract_model
from zaya_jax.ops.grouped_matmul import grouped_matmul
from zaya_jax.ops.registry import KernelSelection, select_kernels
from zaya_jax.ops.target import current_target
from zaya_jax.run.progress import track

OFFSETS = (-128, -64, -32, -16, 0, 16, 32, 64, 128)  # from the hidden size
_STRIDE_ROWS = 4096


class Problem(NamedTuple):
    """One measured function."""

    family: str  # 'square', 'stride', 'model', 'experts', 'newton_schulz' or 'attention'
    name: str  # of the problem in its family
    sizes: Mapping[str, int]  # what the plots have on their axes, by name
    run: Callable[..., Any]  # function of the arrays
    arrays: tuple[jax.ShapeDtypeStruct, ...]  # the floating-point arguments, the first ones
    integers: tuple[np.ndarray, ...]  # the other arguments
    flops: float  # of the operation's definition


class Request(NamedTuple):
    """A request for measurements of products."""

    families: Sequence[str]  # of `commands.FAMILIES`; 'square', which gives the maximum, is always measured, and first
    dtype: str  # 'bfloat16' or 'float32', of the operands
    squares: Sequence[int]  # sizes of the square matrices
    lengths: Sequence[int]  # tokens of a row of attention
    tokens: int  # of a micro-batch on one device
    flush: int  # bytes that are overwritten before a cold call
    repeats: int  # number of timed calls


def measure_gemm(config: Config, request: Request) -> dict[str, Any]:
    """Measure the first device: `maximum`, FLOP/s of the fastest square, and `results`, a row for each problem."""
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
        row = {"family": problem.family, "name": problem.name, **problem.sizes, "flops": problem.flops}
        result["results"].append(row | outcome)
    squares = (row for row in result["results"] if row["family"] == "square")
    result["maximum"] = max((row.get("warm_flops_per_second", 0.0) for row in squares), default=0.0)
    print_tables(TABLES["gemm"](result))
    return result


def make_problems(config: Config, request: Request, kernels: KernelSelection) -> list[Problem]:
    """Make all problems of a request, squares first."""
    model, dtype, tokens = config.model, request.dtype, request.tokens
    made = {
        "square": lambda: squares(request.squares, dtype),
        "stride": lambda: strides(model, tokens, dtype),
        "model": lambda: model_products(model, tokens, dtype),
        "experts": lambda: expert_products(model, tokens, kernels, dtype),
        "newton_schulz": lambda: newton_schulz(model, config.optimizer.muon, kernels),
        "attention": lambda: attention(model, request.lengths, tokens, kernels, dtype),
    }
    return [problem for family, make in made.items() if family in ("square", *request.families) for problem in make()]


def time_problem(problem: Problem, flush: jax.Array, repeats: int) -> dict[str, float]:
    """Return the median seconds of a call with its operands in the caches, `warm`, and after `flush` replaced them."""
    arguments = jax.block_until_ready((*drawn(problem.arrays), *map(jnp.asarray, problem.integers)))
    call, overwrite = jax.jit(problem.run), jax.jit(lambda x: x + 1)

    def one_call() -> None:
        jax.block_until_ready(call(*arguments))

    seconds: dict[str, list[float]] = {"warm": [], "cold": []}
    one_call()
    for _ in range(repeats):  # in turn, since clocks drift
        seconds["cold"] += time_calls(one_call, 1, 0, lambda: overwrite(flush).block_until_ready()).seconds
        seconds["warm"] += time_calls(one_call, 1, 0).seconds
    return {name: statistics.median(each) for name, each in seconds.items()}


def squares(sizes: Sequence[int], dtype: str) -> list[Problem]:
    """Return products of square matrices; over sizes, speed rises and falls with whole tiles."""
    return [_matmul("square", str(n), {"size": n}, ("mk,kn->mn", (n, n), (n, n)), 2.0 * n**3, dtype) for n in sizes]


def strides(model: ModelConfig, tokens: int, dtype: str) -> list[Problem]:
    """Return products that contract widths around the hidden size: rows of 4 KiB compete for a part of the memory."""
    d, rows, problems = model.hidden_size, min(tokens, _STRIDE_ROWS), []
    for k in (d + offset for offset in OFFSETS if d + offset > 0):
        einsum, sizes = ("mk,kn->mn", (rows, k), (k, d)), {"depth": k, "offset": k - d}
        problems.append(_matmul("stride", f"{k} = {d} {k - d:+}", sizes, einsum, 2.0 * rows * k * d, dtype))
    return problems


def model_products(model: ModelConfig, tokens: int, dtype: str) -> list[Problem]:
    """Return every dense product of a layer and of a chunk of the head, forward and both gradients."""
    problems = []
    chunk = min(tokens, chunk_tokens(tokens, model.vocab_size, model.hidden_size, frozen_head=False))
    for product in (*products(model, tokens), *_router_products(model, tokens)):
        if product.name.startswith("experts") or not product.times:
            continue
        batch, columns, depth = product.groups, product.columns, product.depth
        rows = chunk if product.name == "head" else product.rows  # the loss never multiplies all tokens at once
        x, w, y = (batch, rows, depth), (batch, depth, columns), (batch, rows, columns)
        sides = {
            "forward": ("brd,bdc->brc", x, w),
            "input gradient": ("brc,bdc->brd", y, w),
            "weight gradient": ("brd,brc->bdc", x, y),
        }
        sizes, flops = {"rows": rows, "columns": columns, "depth": depth}, 2.0 * batch * rows * columns * depth
        for side, einsum in sides.items():
            problems.append(_matmul("model", f"{product.name}, {side}", sizes, einsum, flops, dtype))
    return problems


def _router_products(model: ModelConfig, tokens: int) -> list[Product]:
    r, layers = model.router_size, model.num_layers
    if model.router != "zaya":
        return [Product("router", layers, 1, tokens, model.num_experts, model.hidden_size)]
    return [
        Product("router, down", layers, 1, tokens, r, model.hidden_size),
        Product("router, hidden", (model.router_layers - 1) * layers, 1, tokens, r, r),
        Product("router, output", layers, 1, tokens, model.num_experts + 1, r),
    ]


def _matmul(
    family: str, name: str, sizes: Mapping[str, int], einsum: tuple[Any, ...], flops: float, dtype: str
) -> Problem:
    equation, *operands = einsum
    return Problem(family, name, sizes, functools.partial(jnp.einsum, equation), _arrays(dtype, *operands), (), flops)


def _arrays(dtype: str, *shapes: tuple[int, ...]) -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple(jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape in shapes)


def expert_products(model: ModelConfig, tokens: int, kernels: KernelSelection, dtype: str) -> list[Problem]:
    """Return the grouped products of a layer's experts, both passes, with the tokens spread evenly over them."""
    d, f, e = model.hidden_size, model.expert_size, model.num_experts
    run = functools.partial(grouped_matmul, **{part: kernels.implementation(part) for part in PRODUCTS})
    both, problems, t = functools.partial(_gradient, run), [], tokens * rows_per_token(model)
    sizes_e = np.diff(np.arange(e + 1) * t // e).astype(np.int32)
    for layer, p, q in (("gate and up", d, 2 * f), ("down", f, d)):
        x, w, y = _arrays(dtype, (t, p), (e, p, q), (t, q))
        sizes, flops = {"rows": t // e, "columns": q, "depth": p}, 2.0 * t * p * q
        problems += [
            Problem("experts", f"{layer}, even, forward", sizes, run, (x, w), (sizes_e,), flops),
            Problem("experts", f"{layer}, even, gradients", sizes, both, (x, w, y), (sizes_e,), 2 * flops),
        ]
    return problems


def _gradient(run: Callable[..., jax.Array], x: jax.Array, w: jax.Array, y: jax.Array, sizes_e: jax.Array) -> Any:
    return jax.vjp(lambda x, w: run(x, w, sizes_e), x, w)[1](y)  # the forward product is unused, so XLA removes it


def newton_schulz(model: ModelConfig, muon: MuonConfig, kernels: KernelSelection) -> list[Problem]:
    """Return the orthogonalization of a parameter of each shape, of one layer, as `muon` has it (reference.md §3.1)."""
    abstract, counts = abstract_model(model), {}
    role_by_name, parts = roles(abstract), fused(abstract) if muon.gate_up == "split" else {}
    for name, shape in shapes(abstract).items():
        if role_by_name[name] in MATRIX_ROLES:
            part = parts.get(name, 1)
            p, q = sorted((shape[-2], shape[-1] // part))
            counts[p, q] = max(counts.get((p, q), 1), part * int(np.prod(shape[1:-2])))
    steps, dtype = muon.newton_schulz_steps, jnp.dtype(muon.newton_schulz_dtype)
    run = functools.partial(kernels.ops.orthogonalize, steps=steps, dtype=dtype, coefficients=muon.coefficients)
    problems = []
    for (p, q), count in sorted(counts.items()):
        name, arrays = f"{count} × {p} × {q}", _arrays("float32", (count, p, q))
        flops = steps * count * 2.0 * (2 * p * p * q + p**3)
        problems.append(Problem("newton_schulz", name, {"rows": p, "columns": q}, run, arrays, (), flops))
    return problems


def attention(
    model: ModelConfig, lengths: Sequence[int], tokens: int, kernels: KernelSelection, dtype: str
) -> list[Problem]:
    """Return causal attention, forward, over lengths and query heads per key head, in rows that `tokens` fill."""
    h, c, problems = model.num_query_heads, model.head_dim, []
    run = functools.partial(_attend, kernels.ops.attention)
    for s, shared in itertools.product(lengths, [n for n in range(1, h + 1) if h % n == 0]):
        b, k = max(1, tokens // s), h // shared
        arrays, segments = _arrays(dtype, (b, s, h, c), (b, s, k, c), (b, s, k, c)), np.ones((b, s), np.int32)
        name, sizes = f"{s} tokens, {h} over {k} heads", {"length": s, "query heads per key head": shared}
        flops = 4.0 * b * h * c * s * (s + 1) / 2
        problems.append(Problem("attention", name, sizes, run, arrays, (segments,), flops))
    return problems


def _attend(run: Callable[..., jax.Array], q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> jax.Array:
    return run(q, k, v, query_segments_bs=segments, key_segments_bt=segments)
