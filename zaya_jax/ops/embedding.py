"""The lookup of token embeddings, with a gradient that is the same in every run."""

import jax
import jax.numpy as jnp


@jax.custom_vjp
def embed(table_vd: jax.Array, tokens_bs: jax.Array) -> jax.Array:
    """Return the rows of `table_vd` for int32 token ids, clipped to its rows: [b, s, d] in the table's dtype.

    On GPUs, the gradient is not the scatter that autodiff makes: it adds the rows of equal tokens with atomic
    operations, in any order, and so gives other bits in each run.
    """
    return jnp.take(table_vd, tokens_bs, axis=0, mode="clip")


def _forward(table_vd: jax.Array, tokens_bs: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return embed(table_vd, tokens_bs), (table_vd, tokens_bs)


def _backward(saved: tuple[jax.Array, jax.Array], gradient_bsd: jax.Array) -> tuple[jax.Array, None]:
    table_vd, tokens_bs = saved
    zeros_vd = jnp.zeros(table_vd.shape, gradient_bsd.dtype)
    tokens_n = jnp.clip(tokens_bs.reshape(-1), 0, len(table_vd) - 1)
    gradient_nd = gradient_bsd.reshape(-1, gradient_bsd.shape[-1])
    return jax.lax.platform_dependent(zeros_vd, tokens_n, gradient_nd, cpu=_scattered, default=add_rows), None


def _scattered(zeros_vd: jax.Array, tokens_n: jax.Array, gradient_nd: jax.Array) -> jax.Array:
    return zeros_vd.at[tokens_n].add(gradient_nd)


def add_rows(table_vd: jax.Array, tokens_n: jax.Array, rows_nd: jax.Array) -> jax.Array:
    """Add each row to the table's row of its token. Equal tokens are added up first, in a tree of fixed shape."""
    order_n = jnp.argsort(tokens_n)
    sorted_n = tokens_n[order_n]

    def combine(first: tuple[jax.Array, jax.Array], second: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return second[0], second[1] + jnp.where(first[0] == second[0], first[1], 0)

    # Within a token's rows, each element is the sum of the rows so far; its last one is the sum of all.
    _, sums_nd = jax.lax.associative_scan(combine, (sorted_n[:, None], rows_nd[order_n]))
    is_last_n = jnp.append(sorted_n[1:] != sorted_n[:-1], True)
    # The others go to different rows outside of the table, so that no index occurs twice.
    target_n = jnp.where(is_last_n, sorted_n, len(table_vd) + jnp.arange(len(tokens_n)))
    return table_vd.at[target_n].add(sums_nd, mode="drop", unique_indices=True)


embed.defvjp(_forward, _backward)
