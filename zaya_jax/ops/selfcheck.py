"""Check implementations of operations on a device: against double precision on the host, and on large arrays."""

import contextlib
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zaya_jax.config import ModelConfig
from zaya_jax.errors import InputError
from zaya_jax.ops.operation import Check

LARGE = 2**32  # bytes; above, kernels need 64-bit addresses
MOST_TIMES = 2**14  # above, the grids of some kernels exceed the limit of GPUs
SAME = 32  # repetitions of rows that keep all of a GPU busy, so that the order of atomic additions varies
Implementation = Callable[..., Any]
# ZAYA1-8B's heads, at a smaller width.
EXAMPLE = ModelConfig(vocab_size=256, hidden_size=512, num_layers=1, num_query_heads=8, num_kv_heads=2, head_dim=128,
                      num_experts=16, expert_size=128, router_size=64, max_positions=512)  # fmt: skip


def compare(check: Check, dtype: str, implementation: Implementation, reference: Implementation) -> float:
    """Return the largest relative error of an operation's outputs and gradients on this process' first device.

    The exact result is that of the reference in double precision on the host's CPU.
    """
    arrays = _draw(check, dtype)
    with _precise(dtype):
        cotangents = _cotangents(check, implementation, arrays)
        outputs = _flat(_program(check, implementation)(arrays, cotangents))
    with jax.enable_x64(True), jax.default_device(host_cpu()):
        exact = _flat(_program(check, reference)(_doubles(arrays), _doubles(cotangents)))
    errors = [np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(outputs, exact, strict=True)]
    return float(np.max(errors))  # Python's max could drop NaN


def compare_large(check: Check, dtype: str, implementation: Implementation, least: int, memory: int) -> float | None:
    """Return the largest relative difference between results for an array and for the same with its rows repeated.

    The large arrays have at least `least` bytes. None if `memory`, in bytes, is too small for them, or rows would be
    repeated more than `MOST_TIMES`; 0 if the check repeats none.
    """
    arrays, rows = _draw(check, dtype), check.rows
    if not rows:
        return 0.0
    times = least // max(x.nbytes for x in arrays[:rows]) + 1
    if times > MOST_TIMES:
        return None
    with _precise(dtype):
        cotangents, program = _cotangents(check, implementation, arrays), _program(check, implementation)

        def errors(arrays: Sequence[jax.Array], cotangents: Sequence[jax.Array], expected: Any) -> jax.Array:
            repeated, outer = ([jnp.repeat(x, times, axis=0) for x in part] for part in (arrays[:rows], cotangents))
            outputs = program([*repeated, *arrays[rows:]], outer)
            return jnp.stack([_apart(x, y, times) for x, y in zip(outputs, expected, strict=True)])

        operands = (arrays, cotangents, program(arrays, cotangents))
        compiled = jax.jit(errors).lower(*operands).compile()
        needs = compiled.memory_analysis()
        if needs is not None and needs.argument_size_in_bytes + needs.temp_size_in_bytes > memory:
            return None
        try:
            return float(np.max(compiled(*operands)))
        except jax.errors.JaxRuntimeError as error:  # fragmentation, which the compiler does not know
            if "Out of memory" not in str(error):
                raise
            return None


def repeats(check: Check, dtype: str, implementation: Implementation) -> bool:
    """Return whether two runs with the same arrays, whose rows are repeated `SAME` times, give the same bits."""
    arrays = [np.repeat(x, SAME, axis=0) if i < check.rows else x for i, x in enumerate(_draw(check, dtype))]
    with _precise(dtype):
        program, cotangents = _program(check, implementation), _cotangents(check, implementation, arrays)
        first, second = ([x.tobytes() for x in jax.device_get(program(arrays, cotangents))] for _ in range(2))
    return first == second


def host_cpu() -> Any:
    """Return the host's CPU as a jax device.

    `InputError` if JAX_PLATFORMS excludes it.
    """
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        platforms = jax.config.read("jax_platforms")
        raise InputError(f"JAX_PLATFORMS={platforms} excludes the CPU backend, which the kernels are checked against. "
                         f"Set JAX_PLATFORMS={platforms},cpu.") from error  # fmt: skip


def free_memory() -> int:
    """Return the free memory of this process' first device in bytes; `sys.maxsize` if it does not report it."""
    stats = jax.local_devices()[0].memory_stats()
    return sys.maxsize if stats is None else stats["bytes_limit"] - stats["bytes_in_use"]


def _apart(large: jax.Array, small: jax.Array, times: int) -> jax.Array:
    """Return the relative difference of `large` from `small` with repeated rows, or from `times` · `small` for sums."""
    expected = small.astype(jnp.float32)[:, None]
    if large.shape == small.shape:
        large, times = large.astype(jnp.float32) / times, 1
    large = large.reshape(small.shape[0], times, *small.shape[1:]).astype(jnp.float32)
    return jnp.linalg.norm((large - expected).ravel()) / (jnp.linalg.norm(expected.ravel()) * times**0.5)


def _outputs(check: Check, implementation: Implementation, *arrays: jax.Array) -> list[jax.Array]:
    return jax.tree.leaves(check.run(implementation, *arrays))


def _program(check: Check, implementation: Implementation) -> Callable[[Sequence[Any], Sequence[Any]], list[jax.Array]]:
    """Compile (arrays, cotangents of the outputs) → outputs, then gradients."""

    def both(arrays: Sequence[jax.Array], cotangents: Sequence[jax.Array]) -> list[jax.Array]:
        run = functools.partial(_outputs, check, implementation)
        if not check.gradient:
            return run(*arrays)
        out, pull = jax.vjp(run, *arrays)
        return [*out, *pull(list(cotangents))]

    return jax.jit(both)


def _draw(check: Check, dtype: str) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [
        (x.mean + x.scale * rng.standard_normal(x.shape, np.float32)).astype(jnp.dtype(dtype)) for x in check.inputs
    ]


def _cotangents(check: Check, implementation: Implementation, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Draw cotangents, rounded like the arrays, in the dtypes of the outputs."""
    rng, outputs = np.random.default_rng(1), jax.eval_shape(functools.partial(_outputs, check, implementation), *arrays)
    return [rng.standard_normal(x.shape, np.float32).astype(arrays[0].dtype).astype(x.dtype) for x in outputs]


def _precise(dtype: str) -> contextlib.AbstractContextManager[Any]:
    """Make fp32 matmuls exact, which some GPUs would do in TF32."""
    return jax.default_matmul_precision("highest") if dtype == "float32" else contextlib.nullcontext()


def _doubles(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    return [array.astype(np.float64) for array in arrays]


def _flat(arrays: Sequence[jax.Array]) -> list[np.ndarray]:
    return [np.asarray(array).astype(np.float64).ravel() for array in jax.device_get(arrays)]
