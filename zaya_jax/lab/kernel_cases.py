"""The cases that kernels are measured on: arrays, FLOPs and bytes of each operation, forward and backward."""

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from zaya_jax.config import ModelConfig, MuonConfig
from zaya_jax.ops.cca_mix import MixInputs, MixWeights
from zaya_jax.ops.grouped_matmul import grouped_matmul
from zaya_jax.ops.registry import OPERATIONS, KernelSelection
from zaya_jax.ops.residual_norm import MergeVectors
from zaya_jax.ops.router import RouterWeights
from zaya_jax.ops.selfcheck import EXAMPLE
from zaya_jax.ops.stacked import StackedLayer
from zaya_jax.optim.muon import scale_by_muon

TAPS = 2  # taps of each convolution
STEPS = 5  # Newton–Schulz iterations
PRODUCTS = OPERATIONS["experts"].uses


class Sizes(NamedTuple):
    """Sizes of the arrays."""

    tokens: int  # tokens of the norm, the CCA mix and attention
    sequence: int  # tokens per row of attention
    mixed: int  # maximum tokens per row of the CCA mix
    width: int  # width of the residual stream
    query_heads: int  # number of query heads
    kv_heads: int  # number of key heads
    channels: int  # channels per head, half of which are rotated
    router: int  # elements of the router's state
    experts: int  # number of experts
    per_expert: int  # tokens per expert
    expert_width: int  # hidden width of an expert
    matrices: tuple[int, int, int]  # number of matrices that Muon orthogonalizes together, and rows and columns of each
    decoded: tuple[int, int]  # rows of a decode step, and keys per row

    @property
    def model(self) -> ModelConfig:
        """One layer of a model with these operations."""
        sizes = {"hidden_size": self.width, "router_size": self.router, "head_dim": self.channels}
        sizes |= {"num_query_heads": self.query_heads, "num_kv_heads": self.kv_heads}
        sizes |= {"num_experts": self.experts, "expert_size": self.expert_width}
        return dataclasses.replace(EXAMPLE, **sizes)


# configs/zaya1_8b.yaml with 16,384 tokens per device; the matrices are the gate and up matrices of a layer.
EIGHT_B = Sizes(16384, 8192, 4096, 2048, 8, 2, 128, 256, 16, 1024, 2048, (16, 2048, 4096), (8, 32768))
SMALL = Sizes(24, 24, 12, 32, 4, 2, 16, 32, 3, 8, 32, (2, 24, 40), (2, 40))


class Case(NamedTuple):
    """An operation at one size, in one direction."""

    operation: str  # name of the operation whose kernel is measured (key of `ops.registry.OPERATIONS`)
    run: Callable[..., Any]  # function of the implementations, then the floats and the integers
    floats: tuple[jax.ShapeDtypeStruct, ...]  # the floating-point arguments
    flops: float  # FLOPs of the operation's definition, with causality but without recomputation or savings by symmetry
    bytes: int  # minimum bytes moved: each input is read once, each output written once
    integers: tuple[np.ndarray, ...] = ()  # the integer arguments, and further arrays that have no gradient
    backward: bool = False  # whether the gradient is measured: cotangents of the outputs → cotangents of the floats
    further: tuple[str, ...] = ()  # other operations that are part of the case
    held: int = 0  # leading floats that are donated, whose memory as many outputs reuse, like the training state
    # integer arguments that take another time, by what they are: `integers` are rows of one document, or even groups
    further_integers: Mapping[str, tuple[np.ndarray, ...]] = MappingProxyType({})

    @property
    def operations(self) -> tuple[str, ...]:
        """All operations of the case, for which its reference uses no kernel."""
        return (self.operation, *self.further)


def cases(sizes: Sizes, dtype: str) -> dict[str, Case]:
    """Return all cases by name; `dtype` is the dtype of activations, 'bfloat16' or 'float32'."""
    by_name: dict[str, Case] = {}
    for make in (_residual_norm, _cca_mix, _attention, _router, _grouped, _experts, _decode, _gram_polynomial):
        by_name |= make(sizes, jnp.dtype(dtype))
    return by_name


def program(case: Case, kernels: KernelSelection) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the function of `case` to jit, and arguments; of a backward pass residuals and output gradients."""
    run, count = functools.partial(case.run, kernels), len(case.floats)
    arrays = (*drawn(case.floats), *(jnp.asarray(array) for array in case.integers))
    if not case.backward:
        return run, arrays

    def kept(*arrays: jax.Array) -> tuple[Any, Any]:
        return jax.vjp(lambda *floats: run(*floats, *arrays[count:]), *arrays[:count])

    out, pull = jax.jit(kept)(*arrays)
    return operator.call, (pull, drawn(out))


def passes(case: Case, kernels: KernelSelection) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the function of `case` to lower, with the forward pass, and its arguments, with floats as shapes."""
    run, count, arguments = functools.partial(case.run, kernels), len(case.floats), (*case.floats, *case.integers)
    if not case.backward:
        return run, arguments

    def both(cotangents: Any, *arrays: jax.Array) -> Any:
        out, pull = jax.vjp(lambda *floats: run(*floats, *arrays[count:]), *arrays[:count])
        return out, pull(cotangents)

    return both, (jax.eval_shape(run, *arguments), *arguments)


def drawn(shapes: Any) -> Any:
    """Draw normal arrays on the default device, with a standard deviation of 0.01, so that no sum overflows."""
    leaves, tree = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    return tree.unflatten([_draw(key, x.shape, x.dtype) for key, x in zip(keys, leaves, strict=True)])


@functools.partial(jax.jit, static_argnums=(1, 2))
def _draw(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return 0.01 * jax.random.normal(key, shape, dtype)


def _array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _size(*arrays: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in arrays)


def _both(name: str, case: Case, **backward: Any) -> dict[str, Case]:
    return {name: case, f"{name} backward": case._replace(backward=True, **backward)}


def _residual_norm(sizes: Sizes, dtype: jnp.dtype) -> dict[str, Case]:
    t, d = sizes.tokens, sizes.width
    floats = out, stream, *_ = (_array(1, t, d, dtype=dtype), _array(1, t, d), *(_array(d),) * 5)

    def run(kernels: KernelSelection, output: jax.Array, stream: jax.Array, *vectors: jax.Array) -> Any:
        return kernels.ops.residual_norm(output, stream, MergeVectors(*vectors[:4]), vectors[4], 1e-5, dtype)

    case = Case("residual_norm", run, floats, 12.0 * t * d, _size(*floats, out, stream))
    return _both("residual_norm", case, flops=30.0 * t * d, bytes=2 * _size(*floats) + _size(out, stream))


def _cca_mix(sizes: Sizes, dtype: jnp.dtype) -> dict[str, Case]:
    s, h, k, c = min(sizes.mixed, sizes.tokens), sizes.query_heads, sizes.kv_heads, sizes.channels
    b, n = sizes.tokens // s, h + k
    taps, kernel = (_array(TAPS, n, c, *more, dtype=dtype) for more in ((), (c,)))
    floats = (_array(b, s, (n + k) * c, dtype=dtype), taps, _array(n, c), kernel, _array(n, c), _array(k))
    angle = np.arange(s)[:, None] / 10000.0 ** (np.arange(c // 4) / (c // 4))
    tables = tuple(np.broadcast_to(f(angle), (b, s, c // 4)).astype(np.float32) for f in (np.cos, np.sin))
    integers, packed = (np.ones((b, s), np.int32), *tables), (packed_documents(b, s), *tables)

    def run(kernels: KernelSelection, packed: jax.Array, *others: jax.Array) -> Any:
        *weights, segments, cos, sin = others
        return kernels.ops.cca_mix(MixInputs(packed, None, segments, (cos, sin), MixWeights(*weights)))

    flops = 2.0 * b * s * n * c * c * TAPS
    moved = _size(*floats, *integers, *(_array(b, s, heads, c, dtype=dtype) for heads in (h, k, k)))
    case = Case("cca_mix", run, floats, flops, moved, integers)
    case = case._replace(further_integers={"packed documents": packed})
    return _both("cca_mix", case, flops=2 * flops, bytes=moved + _size(*floats))


def _attention(sizes: Sizes, dtype: jnp.dtype) -> dict[str, Case]:
    s, h, k, c = sizes.sequence, sizes.query_heads, sizes.kv_heads, sizes.channels
    b, (rows, keys) = sizes.tokens // s, sizes.decoded
    integers, packed = (np.ones((b, s), np.int32),), (packed_documents(b, s),)

    def run(kernels: KernelSelection, *arrays: jax.Array) -> jax.Array:
        q, key, v, segments = arrays
        return kernels.ops.attention(q, key, v, query_segments_bs=segments, key_segments_bt=segments)

    def decode(kernels: KernelSelection, *arrays: jax.Array) -> jax.Array:
        q, key, v, *integers = arrays
        names = "query_segments_bs", "key_segments_bt", "query_offset"
        return kernels.ops.attention(q, key, v, **dict(zip(names, integers, strict=True)))

    q, kv = _array(b, s, h, c, dtype=dtype), _array(b, s, k, c, dtype=dtype)
    flops, floats, sums = 4.0 * b * h * c * s * (s + 1) / 2, (q, kv, kv), _array(b, s, h)
    case = Case("attention", run, floats, flops, _size(q, *floats, *integers), integers)
    case = case._replace(further_integers={"packed documents": packed})
    moved = _size(*floats, *floats, q, q, sums, *integers)
    one, cache = _array(rows, 1, h, c, dtype=dtype), _array(rows, keys, k, c, dtype=dtype)
    floats, documents = (one, cache, cache), (np.ones((rows, 1), np.int32), np.ones((rows, keys), np.int32))
    integers = (*documents, np.full(rows, keys - 1, np.int32))  # lengths can differ between rows
    moved_once = _size(one, *floats, *integers)
    decoded = Case("attention", decode, floats, 4.0 * rows * h * c * keys, moved_once, integers=integers)
    both = _both("attention", case, flops=2.5 * flops, bytes=moved)
    return {**both, "attention of a decode": decoded}


def _router(sizes: Sizes, dtype: jnp.dtype) -> dict[str, Case]:
    t, r, classes = sizes.tokens, sizes.router, sizes.experts + 1
    rows, vector, matrix = _array(1, t, r), _array(r), _array(r, r, dtype=dtype)
    weights = (vector, vector, vector, matrix, vector, matrix, vector, _array(r, classes, dtype=dtype))

    def run(kernels: KernelSelection, projected: jax.Array, state: jax.Array, *weights: jax.Array) -> Any:
        return kernels.ops.router(projected, state, RouterWeights(*weights), 1e-5, dtype)

    floats, flops = (rows, rows, *weights), 2.0 * t * r * (2 * r + classes)
    moved = _size(*floats, _array(1, t, classes), rows)
    case = Case("router", run, floats, flops, moved)
    return _both("router", case, flops=2 * flops, bytes=moved + _size(*floats))


def _grouped(sizes: Sizes, dtype: jnp.dtype) -> dict[str, Case]:
    e, d, q = sizes.experts, sizes.width, 2 * sizes.expert_width
    t, integers = e * sizes.per_expert, (np.full(e, sizes.per_expert, np.int32),)

    def run(kernels: KernelSelection, *arrays: jax.Array) -> jax.Array:
        return grouped_matmul(*arrays, **{part: kernels.implementation(part) for part in PRODUCTS})

    floats, flops = (_array(t, d, dtype=dtype), _array(e, d, q, dtype=dtype)), 2.0 * t * d * q
    moved = _size(*floats, *integers, _array(t, q, dtype=dtype))
    case = Case("grouped_product", run, floats, flops, moved, integers, further=PRODUCTS[1:])
    return _both("grouped_matmul", case, flops=2 * flops, bytes=moved + _size(*floats))


def _experts(sizes: Sizes, dtype: jnp.dtype) -> dict[str, Case]:
    e, d, f = sizes.experts, sizes.width, sizes.expert_width
    t, shuffled = e * sizes.per_expert, np.random.default_rng(0).permutation
    expert = shuffled(np.repeat(np.arange(e, dtype=np.int32), sizes.per_expert))
    # As many as a router gives that is little trained: in proportion to 1, 1/2, 1/3, …
    shares = np.cumsum(1 / np.arange(1, e + 1)) * t / np.sum(1 / np.arange(1, e + 1))
    uneven = np.searchsorted(shares, np.arange(t), side="right").clip(max=e - 1).astype(np.int32)

    def run(kernels: KernelSelection, *arrays: jax.Array) -> jax.Array:
        h, weight, gate_up, down, expert = arrays
        return kernels.ops.experts(h, expert, weight, gate_up, down)

    h, weight, kept = _array(t, d, dtype=dtype), _array(t), _array(t, 2 * f, dtype=dtype)
    floats = (h, weight, _array(e, d, 2 * f, dtype=dtype), _array(e, f, d, dtype=dtype))
    flops, moved = 6.0 * t * d * f, _size(*floats, expert, h)
    case = Case("experts", run, floats, flops, moved, integers=(expert,), further=PRODUCTS)
    further = {"uneven groups": (shuffled(uneven),), "one group": (np.zeros(t, np.int32),)}
    case = case._replace(further_integers=further)
    return _both("experts", case, flops=2 * flops, bytes=moved + _size(kept, *floats))


def _decode(sizes: Sizes, dtype: jnp.dtype) -> dict[str, Case]:
    """Return the cases of a decode step besides attention: a few rows, those of the checks or two for each expert."""
    few = _experts(sizes._replace(per_expert=2), dtype)["experts"]._replace(further_integers={})

    def case(name: str) -> Case:  # whose time is that of its bytes
        (check,) = OPERATIONS[name].checks(sizes.model, False).values()
        floats = tuple(_array(*x.shape, dtype=dtype) for x in check.inputs)
        out = jax.tree.leaves(jax.eval_shape(functools.partial(check.run, OPERATIONS[name].reference), *floats))
        moved = _size(*floats, *out)
        return Case(name, lambda kernels, *x: check.run(kernels.implementation(name), *x), floats, 0.0, moved)

    steps = {"cca_mix of a decode": case("cca_mix_step"), "router of a decode": case("router_step")}
    return {**steps, "experts of a decode": few}


def experts_of_a_step(sizes: Sizes, dtype: str) -> Case:
    """Return the case of both passes, whose gradients of matrices are added to totals, as in a training step."""
    case, backward = _experts(sizes, jnp.dtype(dtype)).values()
    h, _, *matrices = case.floats
    totals = tuple(_array(1, *w.shape) for w in matrices)

    def run(kernels: KernelSelection, up: jax.Array, down: jax.Array, *arrays: jax.Array) -> Any:
        h, weight, *stacks, dout, expert = arrays
        refs = jax.new_ref(up), jax.new_ref(down)

        def forward(h: jax.Array, weight: jax.Array, *probes: jax.Array) -> jax.Array:
            layers = (StackedLayer(w[None], 0, ref, probe) for w, ref, probe in zip(stacks, refs, probes, strict=True))
            return kernels.ops.experts(h, expert, weight, *layers)

        out, pull = jax.vjp(forward, h, weight, *(jnp.zeros((), jnp.float32),) * 2)
        gradients = pull(dout)[:2]  # which adds to the totals
        return *map(jax.freeze, refs), out, gradients

    moved = 2 * _size(*totals) + case.bytes + backward.bytes - _size(*matrices)
    return case._replace(run=run, floats=(*totals, *case.floats, h), flops=3 * case.flops, bytes=moved, held=2)


def packed_documents(rows: int, tokens: int) -> np.ndarray:
    """Return the documents of packed rows, int32 [rows, tokens]; lengths vary around an eighth of a row."""
    lengths = np.random.default_rng(0).lognormal(np.log(max(tokens / 8, 1)), 1.0, rows * 64).astype(np.int64) + 1
    document = np.repeat(np.arange(len(lengths)), lengths)[: rows * tokens].reshape(rows, tokens)
    return (document - document[:, :1] + 1).astype(np.int32)


def _gram_polynomial(sizes: Sizes, dtype: jnp.dtype) -> dict[str, Case]:
    n, p, q = sizes.matrices

    def polynomial(kernels: KernelSelection, x: jax.Array, coefficients: jax.Array) -> jax.Array:
        return kernels.implementation("gram_polynomial")(x, *coefficients, jnp.ones(x.shape[:-2]))

    floats, m, flops = (_array(n, p, q, dtype=dtype), _array(2)), _array(n, p, q), 2.0 * n * p * p * (q + p)
    moved = _size(*floats, _array(n, p, p, dtype=dtype))
    case = Case("gram_polynomial", polynomial, floats, flops, moved)
    step, flops = functools.partial(_muon_step, dtype), STEPS * (flops + 2.0 * n * p * p * q)
    muon = Case("gram_polynomial", step, (m, m, m), flops, _size(m, m, m, m, m), held=2)
    return {"gram_polynomial": case, "muon": muon}


def _muon_step(dtype: jnp.dtype, kernels: KernelSelection, *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the matrices and their momentum after one step."""
    params, momentum, gradient = arrays
    rate, decay = 6e-4, 0.1
    iterates = "bfloat16" if dtype == jnp.bfloat16 else "float32"
    transform = scale_by_muon(MuonConfig(newton_schulz_steps=STEPS, newton_schulz_dtype=iterates))
    state = (optax.TraceState({"m": momentum}), optax.EmptyState())
    moved: Any = transform.update({"m": gradient}, state, ops=kernels.ops)
    directions, (momentum_state, _) = moved
    return params * (1 - rate * decay) - rate * directions["m"], momentum_state.trace["m"]
