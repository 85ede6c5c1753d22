"""Dropless top-1 dispatch: sort tokens by expert, apply a grouped SwiGLU, undo the sort (docs/reference.md §1.4, §1.5).

The kernels take two launches forward and four backward. They gather and scatter tokens in place of separate
permutations, and fuse elementwise work into the matmuls: SwiGLU into the first, the token's weight into the second, and
SwiGLU's gradient into the gradient of the second. The backward pass needs the sorted gate and up projections [t, 2f],
named `MATMUL_OUTPUT`: if rematerialization saves them, no matmul is recomputed.

Kernels and reference take the matrices from the stack of all layers, and add their gradients to the stack's sum in
place: copies of a layer's matrices would take as much memory traffic as everything else in the layer.

Of two kernels, `pallas` gathers rows inside the loop of every product. `pallas_gathered` gathers them once before the
products for the gradients of the matrices, which reached 197 TFLOP/s in a step on an H200, and 538 alone.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.class_sort import class_sort
from pallas_kernels.grouped_matmul import Classes, grouped_outer, grouped_product
from pallas_kernels.grouped_swiglu import grouped_swiglu, grouped_swiglu_backward
from pallas_kernels.tiles import Architecture
from zaya_jax.config import ModelConfig
from zaya_jax.ops.grouped_matmul import grouped_matmul, split
from zaya_jax.ops.names import MATMUL_OUTPUT, recomputed
from zaya_jax.ops.operation import ROWS, Check, Input, Kernel, Operation, other_dtypes
from zaya_jax.ops.parts import part
from zaya_jax.ops.stacked import Matrices, StackedLayer, in_stack, matrix_gradient

# Tokens and classes up to which tokens are sorted by a kernel, whose work grows with the square of the tokens. It is
# cheap enough to run again in the backward pass.
MOST_SORTED, MOST_CLASSES = 2**17, 64
# Tokens up to which they are not sorted if there is no gradient, as in a decode step: each program looks for its own.
MOST_UNSORTED = 64


def dispatch_experts(
    h_td: jax.Array, expert_t: jax.Array, weight_t: jax.Array, gate_up_edf: Matrices, down_efd: Matrices,
    **products: Any,
) -> jax.Array:  # fmt: skip
    """Apply to each token the SwiGLU of its expert, times its weight.

    `expert_t` is the int32 class of each token; values of e or more (skip, padding) give zero and cost nothing.
    `weight_t` is the fp32 factor of each token's output; `gate_up_edf` [e, d, 2f] has gate, then up, and is here and
    below also a `StackedLayer`, as `down_efd` [e, f, d]; `products` are implementations of the operations of
    `grouped_matmul`, by name. Returns [t, d] in the dtype of `h_td`.
    """
    with part("dispatch"):
        order, sizes_e = _sort(expert_t, down_efd.shape[0])
        back = jnp.argsort(order, stable=True)
        sorted_td = permute(h_td, order, back)
    gate_up = grouped_matmul(sorted_td, gate_up_edf, sizes_e, **products)
    gate_up = checkpoint_name(gate_up, MATMUL_OUTPUT)
    hidden_tf = _swiglu(gate_up)
    out_td = checkpoint_name(grouped_matmul(hidden_tf, down_efd, sizes_e, **products), MATMUL_OUTPUT)
    with part("dispatch"):
        return permute(out_td, back, order) * weight_t[:, None].astype(out_td.dtype)


def _sort(expert_t: jax.Array, experts: int) -> tuple[jax.Array, jax.Array]:
    """Return the stable sort order of tokens by class, and the number of tokens of each expert."""
    sizes_e = jnp.zeros(experts + 1, jnp.int32).at[expert_t].add(1)[:experts]
    return jnp.argsort(expert_t, stable=True), sizes_e


@recomputed
def _swiglu(gate_up: jax.Array) -> jax.Array:
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return jax.nn.silu(gate) * up


@jax.custom_vjp
def permute(x_td: jax.Array, order: jax.Array, inverse: jax.Array) -> jax.Array:
    """Return `x_td[order]`; its gradient is a gather by `inverse`, instead of the scatter that autodiff would use."""
    return jnp.take(x_td, order, axis=0, unique_indices=True, mode="clip")


permute.defvjp(
    lambda x_td, order, inverse: (permute(x_td, order, inverse), (inverse, order)),
    lambda saved, dout_td: (permute(dout_td, *saved), None, None),  # None means zero
)


# --- the kernels -----------------------------------------------------------------------------------------------


def _unsupported(
    _architecture: str, h: jax.Array, expert: jax.Array, weight: jax.Array, gate_up: Matrices, down: Matrices
) -> str:
    if why := other_dtypes("experts", h, gate_up, down):
        return why
    (t, d), (e, f, _) = h.shape, down.shape
    if gate_up.shape != (e, d, 2 * f) or down.shape[2] != d:
        shapes = f"{gate_up.shape} and {down.shape}, for tokens {h.shape}"
        return f"The experts kernels need matrices [e, d, 2f] and [e, f, d], not {shapes}."
    if expert.shape != (t,) or weight.shape != (t,):
        return f"Class and weight of {t} tokens must have shape {(t,)}, not {expert.shape} and {weight.shape}."
    return ""


def _kernel(architecture: Architecture, *arguments: Any, gather: bool = False) -> jax.Array | tuple[Any, ...]:
    h_td, expert_t, weight_t, gate_up_edf, down_efd = arguments
    experts = down_efd.shape[0]
    with part("dispatch"):
        if expert_t.shape[0] <= MOST_SORTED and experts < MOST_CLASSES:
            order, sizes_e = class_sort(expert_t, experts, h_td.dtype, architecture=architecture)
        else:
            order, sizes_e = _sort(expert_t, experts)
    x = _Sorted(h_td, expert_t, order, sizes_e, weight_t.astype(jnp.float32), gate_up_edf, down_efd)
    out_td, kept = checkpoint_name(_experts((architecture, gather), x), MATMUL_OUTPUT), _space(x, down_efd)
    return out_td if kept is None else (out_td, kept, down_efd.layer)


class _Sorted(NamedTuple):
    """Inputs of the kernels."""

    h_td: jax.Array
    expert_t: Any
    order_t: Any  # permutation that sorts the tokens by expert
    sizes_e: Any
    weight_t: jax.Array
    gate_up: Any
    down: Any


How = tuple[Architecture, bool]  # and whether rows are gathered before the products for the gradients of matrices


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _experts(how: How, x: _Sorted) -> jax.Array:
    if len(x.h_td) <= MOST_UNSORTED and not isinstance(x.down, StackedLayer):
        x = x._replace(order_t=None, sizes_e=Classes(x.expert_t))  # so that nothing needs the sort, which does not run
    return _run(how[0], x, keep=False)[0]


def _space(x: _Sorted, matrices: Matrices) -> Any:
    """Return the reference to space for the products of these rows, of which a token may have several; or None."""
    kept = in_stack(matrices).kept
    return kept if kept is not None and kept.shape[1] == len(x.h_td) else None


def _run(architecture: Architecture, x: _Sorted, keep: bool, space: Any = (None, None)) -> list[jax.Array]:
    """Return the output, and with `keep` the sorted gate and up projections; or `space` with these in its layer."""
    hidden_tf, *kept_tf = grouped_swiglu(
        x.h_td, x.order_t, in_stack(x.gate_up).pair, x.sizes_e, keep=keep, kept=space[1], architecture=architecture
    )
    down, moved = in_stack(x.down).pair, (x.order_t, x.weight_t)
    return [grouped_product(hidden_tf, down, x.sizes_e, False, moved, space[0], architecture=architecture), *kept_tf]


def _experts_forward(how: How, x: _Sorted) -> tuple[jax.Array, Any]:
    kept_out, kept = _space(x, x.down), _space(x, x.gate_up)
    space = [None if reference is None else reference[...] for reference in (kept_out, kept)]
    out_td, gate_up_tf = _run(how[0], x, True, space)
    if kept_out is not None:
        kept_out[...] = out_td
        out_td = out_td[x.down.layer]
    if kept is None:
        kept = checkpoint_name(gate_up_tf, MATMUL_OUTPUT)
    else:
        kept[...] = gate_up_tf
    return out_td, (x, kept)


def _experts_backward(how: How, saved: Any, dout_td: jax.Array) -> tuple[_Sorted]:
    (architecture, gather), (x, kept) = how, saved  # a reference, or gate and up themselves
    h_td, _, order_t, sizes_e, weight_t, gate_up, down = x
    up_layer, down_layer = in_stack(gate_up).pair, in_stack(down).pair
    dgate_up_tf, hidden_tf, dweight_t = grouped_swiglu_backward(
        dout_td, order_t, weight_t, down_layer, kept[...], sizes_e, architecture
    )
    outer = functools.partial(grouped_outer, sizes_e=sizes_e, architecture=architecture)
    if gather:
        sorted_td, dsorted_td = (jnp.take(x, order_t, axis=0, mode="clip") for x in (h_td, dout_td))
        ddown = matrix_gradient(functools.partial(outer, hidden_tf, dsorted_td), down)
        dgate_up = matrix_gradient(functools.partial(outer, sorted_td, dgate_up_tf), gate_up)
    else:
        ddown = matrix_gradient(functools.partial(outer, hidden_tf, dout_td, order_t=order_t, moved="y"), down)
        dgate_up = matrix_gradient(functools.partial(outer, h_td, dgate_up_tf, order_t=order_t, moved="x"), gate_up)
    dh_td = grouped_product(dgate_up_tf, up_layer, sizes_e, True, (order_t, None), architecture=architecture)
    dweight_t = jnp.zeros_like(weight_t).at[order_t].set(dweight_t, unique_indices=True)
    return (_Sorted(dh_td, None, None, None, dweight_t, dgate_up, ddown),)  # None means zero


_experts.defvjp(_experts_forward, _experts_backward)


# --- the check -------------------------------------------------------------------------------------------------


def _checks(model: ModelConfig, training: bool) -> dict[str, Check]:
    e, d, f = min(model.num_experts, 4), model.hidden_size, model.expert_size
    sizes = split(e, ROWS)
    sorted_t = np.repeat(np.arange(e + 1, dtype=np.int32), [*sizes, ROWS - sizes.sum()])  # the last class is skip
    expert_t = np.random.default_rng(0).permutation(sorted_t)

    def run(experts: Any, h: jax.Array, weight: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
        return experts(h, jnp.repeat(jnp.asarray(expert_t), h.shape[0] // ROWS), weight, gate_up, down)

    arrays = (Input((ROWS, d)), Input((ROWS,), 0.1, 0.5), Input((e, d, 2 * f), d**-0.5), Input((e, f, d), f**-0.5))
    few = tuple(x._replace(shape=(MOST_UNSORTED, *x.shape[1:])) for x in arrays[:2])

    def run_few(experts: Any, h: jax.Array, *others: jax.Array) -> list[jax.Array]:
        some, one = jnp.asarray(expert_t[:MOST_UNSORTED]), jnp.zeros(MOST_UNSORTED, jnp.int32)
        return [experts(h, classes, *others) for classes in (some, one)]

    of_few = Check(run_few, (*few, *arrays[2:]), 0, gradient=False)
    return {"experts": Check(run, arrays, 2)} | ({} if training else {"experts of few": of_few})


def _shape(h: jax.Array, _expert: Any, _weight: Any, _gate_up: Any, down: Matrices) -> tuple[int, ...]:
    return max(h.shape[0] // down.shape[0], 1), h.shape[1], down.shape[1]


_TILES = ("grouped_swiglu", "grouped_product", "class_sort", "grouped_swiglu_backward", "grouped_outer",
          "grouped_product_transposed")  # fmt: skip
_PALLAS = Kernel("pallas", _kernel, _unsupported, _TILES)
_GATHERED = Kernel("pallas_gathered", functools.partial(_kernel, gather=True), _unsupported, _TILES)
_PRODUCTS = ("grouped_product", "grouped_product_transposed", "grouped_outer")
EXPERTS = Operation("experts", dispatch_experts, _checks, (_PALLAS, _GATHERED), uses=_PRODUCTS, shape=_shape)
