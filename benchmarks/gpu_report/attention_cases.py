"""Each kernel of attention against double precision on drawn cases: it refuses with a sentence, or is right."""

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels import short
from zaya_jax.ops.attention import attention
from zaya_jax.ops.kernel_table import Choice
from zaya_jax.ops.operation import TOLERANCE
from zaya_jax.ops.registry import OPERATIONS, preferred_kernels
from zaya_jax.ops.selfcheck import host_cpu
from zaya_jax.ops.target import Target, current_target

_SHAPES, _DRAWS, _SEED = 8, 25, 31  # a shape is compiled once, and drawn so often; the seed gives every kind
_LENGTHS, _CHANNELS, _HEADS = (128, 200, 384, 512, 1024), (64, 128), ((8, 2), (4, 4), (8, 1), (6, 2))


class Shape(NamedTuple):
    """What is compiled: sizes, window, and the index of the first query among the keys."""

    rows: int
    queries: int
    keys: int
    heads: tuple[int, int]  # of queries, of keys
    channels: int
    window: int | None
    offset: int


def draw_shape(rng: np.random.Generator, lengths: tuple[int, ...]) -> Shape:
    """Draw a shape; in a third of them, the queries are some of the keys' positions, such as one in a decode step."""
    keys, offset = int(rng.choice(lengths)), 0
    queries = keys
    if rng.random() < 1 / 3:
        queries = int(rng.choice([1, keys // 3]))
        offset = int(rng.integers(0, keys - queries + 1))
    window = int(rng.integers(1, keys)) if rng.random() < 1 / 2 else None
    heads, channels = _HEADS[rng.integers(len(_HEADS))], int(rng.choice(_CHANNELS))
    return Shape(int(rng.integers(1, 5)), queries, keys, heads, channels, window, offset)


def draw_documents(rng: np.random.Generator, rows: int, length: int) -> np.ndarray:
    """Draw documents, int32 [rows, length]: one or several, of one token, with padding behind or between, or none."""
    segments = np.zeros((rows, length), np.int32)
    for row in segments:
        mean = rng.choice([1, 4, length // 8, length // 2, 2 * length])
        starts = np.cumsum(rng.random(length) < 1 / mean) + 1
        kind = rng.integers(6)
        row[:] = 0 if kind == 0 else np.where(starts % 3 == 0, 0, starts) if kind == 1 else starts
        row[rng.integers(1, length + 1) if kind < 4 else length :] = 0
    return segments


def differentiate(run: Callable[..., jax.Array], shape: Shape, arrays: Any, segments: Any) -> list[jax.Array]:
    """Return attention, and the gradients of queries, keys and values."""
    own = slice(shape.offset, shape.offset + shape.queries)
    options = {"query_segments_bs": segments[:, own], "key_segments_bt": segments}
    options |= {"query_offset": shape.offset, "window": shape.window}
    *qkv, cotangent = arrays
    out, pull = jax.vjp(lambda *x: run(*x, **options), *qkv)
    return [out, *pull(cotangent)]


def measure_attention(small: bool) -> dict[str, Any]:
    """Compare the kernels with the reference on 200 drawn cases in bf16, or on a few at a `small` size, emulated.

    Returns by kernel the number of `cases`, of those in which two runs `differ`, and the largest relative `error` of an
    output or a gradient; `refused`: how often it was for which reason. `failed`: a sentence, if an error is too large.
    """
    target, rng, limit = current_target(), np.random.default_rng(_SEED), TOLERANCE["bfloat16"]
    selection = preferred_kernels(Target("interpret", target.device_kind) if small else target)
    names = [kernel.name for kernel in OPERATIONS["attention"].kernels_for(selection.target.platform)]
    kernels, wrong, refused = {name: {"cases": 0, "differ": 0, "error": 0.0} for name in names}, [], Counter[str]()
    lengths, shapes, draws = ((24, 33), 2, 2) if small else (_LENGTHS, _SHAPES, _DRAWS)
    for shape in [draw_shape(rng, lengths) for _ in range(shapes)]:
        variants = {name: selection.variant("attention", Choice(1, name)) for name in names} | {"": attention}
        runs = {name: jax.jit(functools.partial(differentiate, run, shape)) for name, run in variants.items()}
        reference = runs.pop("")
        for _ in range(draws):
            arrays, segments = _draw_arrays(rng, shape), draw_documents(rng, shape.rows, shape.keys)
            with jax.enable_x64(True), jax.default_device(host_cpu()):
                exact = _flat(reference([x.astype(np.float64) for x in arrays], segments))
            for name, run in runs.items():
                try:
                    first, second = (_flat(run(arrays, segments)) for _ in range(2))
                except ValueError as reason:  # a refusal, while it is traced
                    refused[f"{name}: {reason}"] += 1
                    continue
                row, error = kernels[name], np.max([*map(_error, first, exact)])
                row["cases"] += 1
                row["differ"] += any(x.tobytes() != y.tobytes() for x, y in zip(first, second, strict=True))
                row["error"] = short(float(np.maximum(error, row["error"])))  # keeps NaN
                if not error <= limit:
                    wrong.append(f"{name} has error {error:.2g} in {shape}")
    figures = {f"error of {name}": [row["error"], f"of {limit:g}"] for name, row in kernels.items()}
    figures |= {f"cases of {name} that differ": [row["differ"], f"of {row['cases']}"] for name, row in kernels.items()}
    result = {"kernels": kernels, "refused": dict(refused), "figures": figures}
    return result | {"failed": f"{len(wrong)} cases, such as: {wrong[0]}."} if wrong else result


def _draw_arrays(rng: np.random.Generator, shape: Shape) -> list[np.ndarray]:
    """Draw queries, keys, values and the gradient of the output, in bf16."""
    of_queries, of_keys = zip((shape.queries, shape.keys), shape.heads, strict=True)
    sizes = [(shape.rows, *size, shape.channels) for size in (of_queries, of_keys, of_keys, of_queries)]
    return [rng.standard_normal(size, np.float32).astype(jnp.bfloat16) for size in sizes]


def _flat(arrays: list[jax.Array]) -> list[np.ndarray]:
    return [np.asarray(array).astype(np.float64).ravel() for array in jax.device_get(arrays)]


def _error(ours: np.ndarray, exact: np.ndarray) -> float:
    """Return the relative error, of results that cancel (such as gradients in documents of one token) that to 0.01."""
    return float(np.linalg.norm(ours - exact) / max(np.linalg.norm(exact), 0.01 * exact.size**0.5))
