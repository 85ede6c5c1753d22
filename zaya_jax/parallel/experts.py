"""Expert parallelism: each device along the axis `expert` holds some of the experts, and tokens are sent to them.

Both variants are dropless for any routing. Tokens that skip are not multiplied; the ragged variant does not send them.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from zaya_jax.ops.experts import permute
from zaya_jax.parallel.collectives import sum_scatter

AXIS = "expert"
Experts = Callable[..., jax.Array]  # `ops.experts.dispatch_experts`
Exchange = Callable[..., jax.Array]  # `jax.lax.ragged_all_to_all`


def gathered_experts(local: Experts) -> Experts:
    """Make `Ops.experts` that all-gathers the tokens, and reduce-scatters the outputs.

    Every device receives all tokens of the expert axis and applies the experts it holds, with `local`. For each token,
    at most one device contributes a nonzero output.
    """

    def experts(h_td: jax.Array, expert_t: jax.Array, weight_t: jax.Array, *matrices: jax.Array) -> jax.Array:
        own = matrices[0].shape[0]
        all_td = jax.lax.all_gather(h_td, AXIS, axis=0, tiled=True)
        choice_t = jax.lax.all_gather(expert_t, AXIS, axis=0, tiled=True) - jax.lax.axis_index(AXIS) * own
        mine_t = jnp.where((choice_t >= 0) & (choice_t < own), choice_t, own)
        out_td = local(all_td, mine_t, jnp.ones(mine_t.shape, weight_t.dtype), *matrices)
        out_td = sum_scatter(out_td, AXIS, 0)
        return out_td * weight_t[:, None].astype(out_td.dtype)

    return experts


def ragged_experts(local: Experts, exchange: Exchange, devices: int) -> Experts:
    """Make `Ops.experts` that sends each token to the device of its expert and back, with a ragged all-to-all.

    Each of the `devices` allocates space for the tokens of all of them, the worst case, and applies `local` to the
    experts it holds. `exchange` is `jax.lax.ragged_all_to_all`, or an equivalent.
    """

    def experts(h_td: jax.Array, expert_t: jax.Array, weight_t: jax.Array, *matrices: jax.Array) -> jax.Array:
        t, own = h_td.shape[0], matrices[0].shape[0]
        order = jnp.argsort(expert_t, stable=True)
        back = jnp.argsort(order, stable=True)
        sizes_e = jnp.zeros(devices * own + 1, jnp.int32).at[expert_t].add(1)[:-1]
        sizes_xe = jax.lax.all_gather(sizes_e, AXIS)  # of each sender
        dispatch, combine = _routes(sizes_xe, devices)
        arrived = _travel(exchange, devices * t, permute(h_td, order, back), dispatch, combine)
        mine_xe = jax.lax.dynamic_slice_in_dim(sizes_xe, jax.lax.axis_index(AXIS) * own, own, 1)
        arrived_t = _arrived_experts(mine_xe, devices * t)
        out = local(arrived, arrived_t, jnp.ones(devices * t, weight_t.dtype), *matrices)
        returned: jax.Array = _travel(exchange, t, out, combine, dispatch)
        return permute(returned, back, order) * weight_t[:, None].astype(returned.dtype)

    return experts


class Route(NamedTuple):
    """The offsets and sizes that `ragged_all_to_all` takes, int32 [devices] each."""

    input_offsets: jax.Array
    send_sizes: jax.Array
    output_offsets: jax.Array
    recv_sizes: jax.Array


def _routes(sizes_xe: jax.Array, devices: int) -> tuple[Route, Route]:
    """Return the routes to the experts and back; rows are sorted by receiver on one side, by sender on the other."""
    rank = jax.lax.axis_index(AXIS)
    moved_xy = sizes_xe.reshape(devices, devices, -1).sum(-1)  # from sender x to receiver y
    begin_here_xy = jnp.cumsum(moved_xy, 1) - moved_xy  # among the rows of sender x
    begin_there_xy = jnp.cumsum(moved_xy, 0) - moved_xy  # among the rows of receiver y
    dispatch = Route(begin_here_xy[rank], moved_xy[rank], begin_there_xy[rank], moved_xy[:, rank])
    combine = Route(begin_there_xy[:, rank], moved_xy[:, rank], begin_here_xy[:, rank], moved_xy[rank])
    return dispatch, combine


def _arrived_experts(mine_xe: jax.Array, rows: int) -> jax.Array:
    """Return the local expert of each row that arrived, int32 [rows]; rows are sorted by sender, then by expert.

    Rows without a token get the number of local experts, which means skip.
    """
    own = mine_xe.shape[1]
    ends = jnp.cumsum(mine_xe.reshape(-1))
    group = jnp.searchsorted(ends, jnp.arange(rows), side="right")
    return jnp.where(group < ends.shape[0], group % own, own).astype(jnp.int32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _travel(exchange: Exchange, rows: int, x: jax.Array, dispatch: Route, combine: Route) -> jax.Array:
    """Send `x` [t, d] along `dispatch` into [rows, d], zero where nothing arrives; gradients go along `combine`."""
    del combine
    return exchange(x, jnp.zeros((rows, x.shape[1]), x.dtype), *dispatch, axis_name=AXIS)


def _travel_forward(exchange: Exchange, rows: int, x: jax.Array, dispatch: Route, combine: Route) -> tuple[Any, Any]:
    return _travel(exchange, rows, x, dispatch, combine), (x[:, :0], dispatch, combine)


def _travel_backward(exchange: Exchange, rows: int, saved: Any, g: jax.Array) -> tuple[Any, ...]:
    del rows
    like, dispatch, combine = saved
    return _travel(exchange, like.shape[0], g, combine, dispatch), None, None  # None means zero


_travel.defvjp(_travel_forward, _travel_backward)
