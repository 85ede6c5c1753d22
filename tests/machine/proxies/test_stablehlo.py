import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.launch import launch
from zaya_jax.machine.proxies.codegen import lower
from zaya_jax.machine.proxies.stablehlo import count_launches
from zaya_jax.ops.target import Target

TARGET = Target("rocm", "gfx942")
X = jax.ShapeDtypeStruct((64, 64), jnp.float32)
BYTES = 64 * 64 * 4
ROW = 64 * 4


def count(function, *arrays):
    return count_launches(lower(function, *(arrays or (X,)), target=TARGET))


def figures(function, *arrays):
    found = count(function, *arrays)
    return found.products, found.fusions, found.bytes


def test_what_is_elementwise_is_one_launch():
    assert figures(lambda x: jnp.exp(x) * 2 + x.T) == (0, 1, 2 * BYTES)


def test_what_is_not_returned_is_not_launched():
    def both(x):
        return jax.lax.optimization_barrier((jnp.exp(x), x @ jnp.sin(x)))

    assert figures(lambda x: both(x)[0]) == (0, 1, 2 * BYTES)
    assert figures(both)[:2] == (1, 1)


def test_a_copy_is_none():
    assert figures(lambda x: x.reshape(-1)) == (0, 0, 0)


def test_a_product_is_a_launch_and_so_is_what_follows_and_what_it_is_made_of():
    assert figures(lambda x: x @ x) == (1, 0, 2 * BYTES)
    assert figures(lambda x: jnp.exp(x @ x)) == (1, 1, 4 * BYTES)
    assert figures(lambda x: jnp.exp(x) @ x) == (1, 1, 5 * BYTES)


def test_a_transpose_in_front_of_a_product_is_none():
    assert figures(lambda x: x @ x.T) == (1, 0, 2 * BYTES)
    assert figures(lambda x: x.T @ jnp.exp(x)) == (1, 1, 5 * BYTES)


def test_a_reduction_is_fused_with_what_it_reduces_and_ends_the_group():
    assert figures(lambda x: jnp.exp(x).sum(1)) == (0, 1, BYTES + ROW)
    # The exponentials are made again where they are divided.
    assert figures(lambda x: jnp.exp(x) / jnp.exp(x).sum(1, keepdims=True)) == (0, 2, BYTES + ROW + 2 * BYTES + ROW)


def test_a_softmax_is_three():
    assert count(lambda x: jax.nn.softmax(x, axis=-1)).fusions == 3


def test_what_reads_the_same_array_is_one_and_what_reads_others_another():
    assert figures(lambda x: (jnp.exp(x), jnp.sin(x))) == (0, 1, 3 * BYTES)
    assert figures(lambda x, y: (jnp.exp(x), jnp.sin(y)), X, X) == (0, 2, 4 * BYTES)


def test_of_a_slice_only_the_slice_is_read():
    assert figures(lambda x: x[:8] + 1) == (0, 1, 2 * BYTES // 8)


def test_constants_and_numbers_are_none():
    assert figures(lambda x: (jnp.zeros((8, 8)), x[0, 0] * 2 + 1))[:2] == (0, 0)


def test_a_sort_and_a_scatter_are_one_each():
    found = count(lambda x: (jnp.sort(x, axis=0), x.at[jnp.array([3, 1])].add(1.0)))
    assert dict(found.others) == {"sort": 1, "scatter": 1}


def test_the_body_of_a_loop_is_counted_once_and_apart():
    def looped(x):
        def body(total, row):
            return jnp.sin(total @ x) + row, None

        return jax.lax.scan(body, jnp.exp(x), x)[0]

    found = count(looped)
    assert (found.total, found.fusions) == (1, 1)  # the exponentials that it begins with
    (body,) = found.loops
    assert (body.products, body.fusions) == (1, 1)
    assert found.in_loops == [2]


def test_loops_within_loops_follow():
    def looped(x):
        return jax.lax.fori_loop(0, 3, lambda _, y: jax.lax.fori_loop(0, 4, lambda _, z: z @ z, y) + 1, x)

    assert count(looped).in_loops == [1, 1]


def test_functions_that_are_called_count_where_they_are_called():
    inner = jax.jit(lambda x: jnp.exp(x) @ x)
    assert figures(lambda x: inner(inner(x)))[:2] == (2, 2)


def copy(x_ref, out_ref):
    out_ref[...] = x_ref[...]


def test_kernels_are_counted_by_name_and_their_inputs_stand_in_memory():
    run = functools.partial(launch, copy, name="copy", grid=(1,), out_shape=X, warps=4, architecture="rocm")
    found = count(lambda x: jnp.sin(run(run(jnp.exp(x)))))
    assert dict(found.kernels) == {"copy": 2}
    assert (found.total, found.fusions, found.bytes) == (4, 2, 4 * BYTES)


def test_what_is_not_known_is_told():
    with pytest.raises(ValueError, match=r"The launches of stablehlo\.case cannot be counted\."):
        count(lambda x: jax.lax.cond(x[0, 0] > 0, jnp.exp, jnp.sin, x))
