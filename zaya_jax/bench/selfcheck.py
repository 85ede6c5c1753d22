"""Self-checks of a device: each operation against double precision on the host's CPU, each collective against numpy."""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from zaya_jax.ops import no_halo
from zaya_jax.ops.attention import attention
from zaya_jax.ops.cca_mix import MixWeights, cca_mix
from zaya_jax.ops.dispatch import dispatch_experts
from zaya_jax.ops.grouped_matmul import grouped_matmul
from zaya_jax.ops.norm import rms_norm
from zaya_jax.ops.orthogonalize import orthogonalize
from zaya_jax.ops.target import Target, target_of
from zaya_jax.parallel.mesh import make_mesh

# The norm of the difference over the norm of the exact result, of outputs and gradients, the largest: a few
# roundings of a dtype whose own relative error is at most 6e-8, or 4e-3. TF32 products, 5e-4, pass as fp32.
TOLERANCE = {"float32": 1e-3, "bfloat16": 3e-2}
# Newton–Schulz makes a rounding of a small singular value larger by up to 3.4 in each of its five steps.
_ORTHOGONALIZE = {"float32": 1e-3, "bfloat16": 1e-1}


class Check(NamedTuple):
    """An operation and what it is given.

    Attributes:
      run: takes the target and the arrays.
      arrays: fp32, rounded to the dtype that is checked before either side gets them.
      gradient: whether the gradient of each array is checked as well.
      tolerance: by dtype.
    """

    run: Callable[..., Any]
    arrays: Sequence[np.ndarray]
    gradient: bool = True
    tolerance: Mapping[str, float] = TOLERANCE


def check_operations(checks: Mapping[str, Check], dtypes: Sequence[str] = ("float32", "bfloat16")) -> dict[str, Any]:
    """Compare the default device with the host's CPU.

    Returns:
      `errors`, relative, by operation and dtype, with the `tolerance` of each; and where one is above it `failed`,
      a sentence.
    """
    found: dict[str, Any] = {"errors": {}}
    wrong = []
    for name, check in checks.items():
        for dtype, error in compare(check, dtypes).items():
            allowed = check.tolerance[dtype]
            found["errors"][f"{name} {dtype}"] = {"error": float(f"{error:.3g}"), "tolerance": allowed}
            if not error <= allowed:  # written so that NaN fails
                wrong.append(f"{name} in {dtype} is {error:.2g} off, but may be {allowed:g}")
    if wrong:
        found["failed"] = "; ".join(wrong) + "."
    return found


def compare(check: Check, dtypes: Sequence[str]) -> dict[str, float]:
    """By dtype, the largest relative error of the operation's outputs and gradients on the default device."""
    device, host = jax.devices()[0], jax.devices("cpu")[0]
    ours, exact = _program(check, target_of(device)), _program(check, target_of(host))
    errors = {}
    for dtype in dtypes:
        rounded = [array.astype(jnp.dtype(dtype)) for array in check.arrays]
        # Of fp32 some GPUs would otherwise make TF32.
        precise = jax.default_matmul_precision("highest") if dtype == "float32" else contextlib.nullcontext()
        with precise, jax.default_device(device):
            shapes = jax.tree.leaves(jax.eval_shape(functools.partial(check.run, target_of(device)), *rounded))
            rng = np.random.default_rng(1)
            cotangents = [rng.normal(size=one.shape).astype(jnp.dtype(dtype)) for one in shapes]
            cast = [array.astype(one.dtype) for array, one in zip(cotangents, shapes, strict=True)]
            found = _flat(ours(rounded, cast))
        with jax.enable_x64(True), jax.default_device(host):
            wanted = _flat(exact(_doubles(rounded), _doubles(cotangents)))
        errors[dtype] = max(
            float(np.linalg.norm(one - other) / np.linalg.norm(other)) for one, other in zip(found, wanted, strict=True)
        )
    return errors


def _program(check: Check, target: Target) -> Callable[[list[np.ndarray], list[np.ndarray]], list[jax.Array]]:
    """From arrays and the cotangents of the outputs to outputs, then gradients."""

    def run(*arrays: jax.Array) -> list[jax.Array]:
        return jax.tree.leaves(check.run(target, *arrays))

    def both(arrays: list[jax.Array], cotangents: list[jax.Array]) -> list[jax.Array]:
        if not check.gradient:
            return run(*arrays)
        out, pull = jax.vjp(run, *arrays)
        return [*out, *pull(cotangents)]

    return jax.jit(both)


def _doubles(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    return [array.astype(np.float64) for array in arrays]


def _flat(arrays: Sequence[jax.Array]) -> list[np.ndarray]:
    return [np.asarray(array).astype(np.float64).ravel() for array in jax.device_get(arrays)]


def operation_checks() -> dict[str, Check]:
    """One check for each operation of `zaya_jax.ops`, with ZAYA1-8B's heads and fewer tokens, channels and experts."""
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    b, s, h, k, c = 2, 384, 8, 2, 128
    segments: Any = np.zeros((b, s), np.int32)
    segments[0, :100], segments[0, 100:350] = 1, 2  # two documents and padding; the other row is one document
    segments[1] = 1
    heads = [draw(b, s, h, c), draw(b, s, k, c), draw(b, s, k, c)]
    angle = np.arange(s)[None, :, None] / 100.0 ** (np.arange(c // 4) / (c // 4))
    rotary: Any = [np.broadcast_to(f(angle), (b, s, c // 4)).astype(np.float32) for f in (np.cos, np.sin)]
    t, d, f, e = 512, 256, 128, 16
    expert: Any = rng.choice(e + 1, size=t, p=[0.3, *[0.6 / (e - 1)] * (e - 1), 0.1]).astype(
        np.int32
    )  # the last is skip
    sizes: Any = np.bincount(expert, minlength=e + 1)[:e].astype(np.int32)

    def attend(window: int | None) -> Callable[..., jax.Array]:
        return lambda _, q, k, v: attention(q, k, v, query_segments_bs=segments, key_segments_bt=segments,
                                            window=window)  # fmt: skip

    def mix(_: Target, u: jax.Array, current: jax.Array, delayed: jax.Array, *weights: jax.Array) -> Any:
        halo = no_halo(u, delayed, segments, 2)
        return cca_mix(u, current, delayed, halo, segments, (rotary[0], rotary[1]), MixWeights(*weights), None)

    mixed = [draw(b, s, h + k, c), draw(b, s, k * c // 2), draw(b, s, k * c // 2), draw(2, h + k, c), draw(h + k, c),
             draw(2, h + k, c, c) / c**0.5, draw(h + k, c), 1 + 0.1 * draw(k)]  # fmt: skip
    experts = [draw(t, d), rng.uniform(0.1, 1, t).astype(np.float32), draw(e, d, 2 * f) / d**0.5,
               draw(e, f, d) / f**0.5]  # fmt: skip
    return {
        "attention": Check(attend(None), heads),
        "attention, window": Check(attend(100), heads),
        "cca_mix": Check(mix, mixed),
        "grouped_matmul": Check(
            lambda target, x, w: grouped_matmul(x, w, sizes, target=target), [draw(t, d), draw(e, d, f) / d**0.5]
        ),
        "dispatch_experts": Check(
            lambda target, x, weight, up, down: dispatch_experts(x, expert, weight, up, down, target=target), experts
        ),
        "rms_norm": Check(lambda _, x, weight: rms_norm(x, weight, 1e-5, x.dtype), [draw(t, d), 1 + 0.1 * draw(d)]),
        "orthogonalize": Check(
            lambda _, m: orthogonalize(m, steps=5, dtype=m.dtype), [draw(3, 128, 256)], False, _ORTHOGONALIZE
        ),
    }  # fmt: skip


def check_collectives() -> dict[str, Any]:
    """Do each collective over all devices of this process, with integers that every dtype holds exactly.

    Returns:
      `devices`, and the `dtypes` tried; `skipped`, a sentence, where there is one device; `failed`, a sentence,
      where a result differs from numpy's.
    """
    mesh = make_mesh()
    n = mesh.size
    if n < 2:
        return {"devices": n, "skipped": "There is one device, so nothing to send between devices."}
    rows = np.random.default_rng(0).integers(0, 8, (n, 4 * n))  # sums stay below 256 for up to 36 devices
    chunks = rows.reshape(n, n, 4)
    expected = {
        "psum": np.tile(rows.sum(0), (n, 1)),
        "all_gather": np.tile(rows.reshape(-1), (n, 1)),
        "psum_scatter": rows.sum(0).reshape(n, 4),
        "all_to_all": chunks.swapaxes(0, 1).reshape(n, -1),
        "ppermute": np.roll(rows, 1, 0),
    }
    wrong, dtypes = [], ("float32", "bfloat16", "int32")
    for dtype in dtypes:
        region = jax.shard_map(_collectives, mesh=mesh, in_specs=PartitionSpec("data"),
                               out_specs=PartitionSpec("data"), check_vma=False)  # fmt: skip
        found = jax.device_get(jax.jit(region)(rows.astype(jnp.dtype(dtype))))
        wrong += [f"{name} of {dtype}" for name, array in expected.items() if not np.array_equal(found[name], array)]
    result: dict[str, Any] = {"devices": n, "dtypes": list(dtypes)}
    if wrong:
        result["failed"] = f"These gave wrong numbers over {n} devices: {', '.join(wrong)}."
    return result


def _collectives(x_1s: jax.Array) -> dict[str, jax.Array]:
    """Each collective of a device's row, as a row."""
    n = jax.lax.axis_size("data")
    return {
        "psum": jax.lax.psum(x_1s, "data"),
        "all_gather": jax.lax.all_gather(x_1s, "data", axis=1, tiled=True),
        "psum_scatter": jax.lax.psum_scatter(x_1s, "data", scatter_dimension=1, tiled=True),
        "all_to_all": jax.lax.all_to_all(x_1s.reshape(n, -1), "data", 0, 0, tiled=True).reshape(1, -1),
        "ppermute": jax.lax.ppermute(x_1s, "data", [(i, (i + 1) % n) for i in range(n)]),
    }
