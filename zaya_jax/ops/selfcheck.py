"""Self-checks of a device: each operation, as it is done there, against double precision on the host's CPU."""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from zaya_jax.config import ModelConfig
from zaya_jax.ops import no_halo, ops_for
from zaya_jax.ops.cca_mix import MixWeights
from zaya_jax.ops.grouped_matmul import grouped_matmul
from zaya_jax.ops.momentum import momentum_numbers, step_momentum
from zaya_jax.ops.orthogonalize import orthogonalize
from zaya_jax.ops.precision import accumulation_dtype
from zaya_jax.ops.residual_norm import MergeVectors
from zaya_jax.ops.target import Target, target_of

# The norm of the difference over the norm of the exact result, of outputs and gradients, the largest: a few
# roundings of a dtype whose own relative error is at most 6e-8, or 4e-3. TF32 products, 5e-4, pass as fp32.
TOLERANCE = {"float32": 1e-3, "bfloat16": 3e-2}
# Newton–Schulz makes a rounding of a small singular value larger by up to 3.4 in each of its five steps.
_ORTHOGONALIZE = {"float32": 1e-3, "bfloat16": 1e-1}
# ZAYA1-8B's heads, at a smaller width.
EXAMPLE = ModelConfig(vocab_size=256, hidden_size=512, num_layers=1, num_query_heads=8, num_kv_heads=2, head_dim=128,
                      num_experts=16, expert_size=128, router_size=64, max_positions=512)  # fmt: skip


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


def compare(check: Check, dtypes: Sequence[str], target: Target | None = None) -> dict[str, float]:
    """By dtype, the largest relative error of the operation's outputs and gradients.

    Args:
      check: the operation.
      dtypes: to compute in.
      target: how it is done on this process's first device; as is usual there where None.
    """
    device, host = jax.local_devices()[0], jax.local_devices(backend="cpu")[0]
    target = target or target_of(device)
    ours, exact = _program(check, target), _program(check, target_of(host))
    errors = {}
    for dtype in dtypes:
        rounded = [array.astype(jnp.dtype(dtype)) for array in check.arrays]
        # Of fp32 some GPUs would otherwise make TF32.
        precise = jax.default_matmul_precision("highest") if dtype == "float32" else contextlib.nullcontext()
        with precise, jax.default_device(device):
            shapes = jax.tree.leaves(jax.eval_shape(functools.partial(check.run, target), *rounded))
            rng = np.random.default_rng(1)
            cotangents = [rng.normal(size=one.shape).astype(jnp.dtype(dtype)) for one in shapes]
            cast = [array.astype(one.dtype) for array, one in zip(cotangents, shapes, strict=True)]
            found = _flat(ours(rounded, cast))
        with jax.enable_x64(True), jax.default_device(host):
            wanted = _flat(exact(_doubles(rounded), _doubles(cotangents)))
        apart = [np.linalg.norm(one - other) / np.linalg.norm(other) for one, other in zip(found, wanted, strict=True)]
        errors[dtype] = float(np.max(apart))  # Python's own would drop NaN
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


def operation_checks(model: ModelConfig = EXAMPLE) -> dict[str, Check]:
    """One check for each operation of `zaya_jax.ops`, by name; 'attention, window' is a second one of `attention`.

    Args:
      model: whose heads, taps and width they have; with fewer tokens and experts, and smaller matrices.
    """
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    b, s, h, k, c = 2, 384, model.num_query_heads, model.num_kv_heads, model.head_dim
    segments: Any = np.zeros((b, s), np.int32)
    segments[0, :100], segments[0, 100:350] = 1, 2  # two documents and padding; the other row is one document
    segments[1] = 1
    heads = [draw(b, s, h, c), draw(b, s, k, c), draw(b, s, k, c)]
    pairs = model.rotary_size // 2
    angle = np.arange(s)[None, :, None] / 100.0 ** (np.arange(pairs) / max(pairs, 1))
    rotary: Any = [np.broadcast_to(f(angle), (b, s, pairs)).astype(np.float32) for f in (np.cos, np.sin)]
    t, d, f, e = 512, 256, 128, min(model.num_experts, 16)
    share = [0.3, *[0.6 / max(e - 1, 1)] * (e - 1)]
    expert: Any = rng.choice(e + 1, size=t, p=[*share, 1 - sum(share)]).astype(np.int32)  # the last is skip
    sizes: Any = np.bincount(expert, minlength=e + 1)[:e].astype(np.int32)

    def attend(window: int | None) -> Callable[..., jax.Array]:
        return lambda target, q, k, v: ops_for(target).attention(
            q, k, v, query_segments_bs=segments, key_segments_bt=segments, window=window
        )

    def mix(target: Target, u: jax.Array, current: jax.Array, delayed: jax.Array, *weights: jax.Array) -> Any:
        halo = no_halo(u, delayed, segments, taps0 + taps1 - 2)
        tables = tuple(jnp.asarray(table, jnp.promote_types(u.dtype, jnp.float32)) for table in rotary)
        return ops_for(target).cca_mix(u, current, delayed, halo, segments, tables, MixWeights(*weights), None)

    def merge(target: Target, output: jax.Array, stream: jax.Array, *vectors: jax.Array) -> Any:
        merged = MergeVectors(*vectors[:4])
        exact = jnp.promote_types(stream.dtype, jnp.float32)
        merged = MergeVectors(*(vector.astype(exact) for vector in merged))
        return ops_for(target).residual_norm(output, stream.astype(exact), merged, vectors[4], 1e-5, output.dtype)

    def move(target: Target, gradient: jax.Array, momentum: jax.Array) -> Any:
        """A step, and one that is skipped for a gradient that is not finite; in the dtypes of training."""
        exact = accumulation_dtype(momentum.dtype)

        def one(gradient: jax.Array, *, skip: bool) -> tuple[jax.Array, jax.Array]:
            numbers = momentum_numbers((0.95, 1.0, 0.95, 1.0), 0.5, skip, exact)
            return step_momentum(gradient.astype(exact), momentum.astype(exact), numbers, gradient.dtype,
                                 platform=target.kernel("momentum"))  # fmt: skip

        kept, _ = one(gradient + jnp.nan, skip=True)
        return *one(gradient, skip=False), kept

    taps0, taps1, n = model.depthwise_kernel, model.grouped_kernel, h + k
    mixed = [draw(b, s, n, c), draw(b, s, k * c // 2), draw(b, s, k * c // 2), draw(taps0, n, c), draw(n, c),
             draw(taps1, n, c, c) / c**0.5, draw(n, c), 1 + 0.1 * draw(k)]  # fmt: skip
    experts = [draw(t, d), rng.uniform(0.1, 1, t).astype(np.float32), draw(e, d, 2 * f) / d**0.5,
               draw(e, f, d) / f**0.5]  # fmt: skip
    width = model.hidden_size
    vectors = [1 + 0.1 * draw(width), 0.1 * draw(width), 1 + 0.1 * draw(width), 0.1 * draw(width), draw(width)]
    return {
        "residual_norm": Check(merge, [draw(64, width), draw(64, width), *vectors]),
        "cca_mix": Check(mix, mixed),
        "attention": Check(attend(None), heads),
        "attention, window": Check(attend(100), heads),
        "grouped_matmul": Check(
            lambda target, x, w: grouped_matmul(x, w, sizes, target=target), [draw(t, d), draw(e, d, f) / d**0.5]
        ),
        "dispatch_experts": Check(
            lambda target, x, weight, up, down: ops_for(target).experts(x, expert, weight, up, down), experts
        ),
        "rms_norm": Check(lambda target, x, weight: ops_for(target).rms_norm(x, weight, 1e-5, x.dtype),
                          [draw(t, d), 1 + 0.1 * draw(d)]),
        "momentum": Check(move, [draw(3, 128, 255), draw(3, 128, 255)], False),
        "orthogonalize": Check(
            lambda target, m: orthogonalize(m, steps=5, dtype=m.dtype, target=target), [draw(3, 128, 256)], False,
            _ORTHOGONALIZE,
        ),
    }  # fmt: skip
