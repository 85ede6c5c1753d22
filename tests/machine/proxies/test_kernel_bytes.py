import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from pallas_kernels.launch import launch
from tests.kernel_helpers import kernels
from zaya_jax.machine.proxies import kernel_bytes as module
from zaya_jax.machine.proxies.kernel_bytes import LINE, kernel_bytes
from zaya_jax.machine.proxies.kernel_cases import SMALL, cases, passes

X = jax.ShapeDtypeStruct((64, 32), jnp.float32)  # a row is a line
WHOLE = math.prod(X.shape) * 4
TILE = 16


def rows(first, size=TILE):
    return (first + jnp.arange(size, dtype=jnp.int32))[:, None], jnp.arange(32, dtype=jnp.int32)[None, :]


def run(kernel, *arrays, out=X, grid=(4,)):
    call = functools.partial(launch, kernel, name="toy", grid=grid, out_shape=out, warps=4, architecture="rocm")
    (found,) = kernel_bytes(call, *arrays)
    return found


def copied(x_ref, out_ref, before=0):
    row, column = rows(pl.program_id(0) * TILE)
    x = triton.load(x_ref.at[row - before, column], mask=(row >= before) & (column >= 0), other=0)
    triton.store(out_ref.at[row, column], x)


def test_a_copy_moves_each_byte_once_each_way():
    found = run(copied, X)
    assert found._asdict() == {
        "name": "toy",
        "programs": 4,
        "requested": 2 * WHOLE,
        "moved": 2 * WHOLE,
        "least": 2 * WHOLE,
    }


def test_what_a_mask_hides_is_not_read():
    found = run(functools.partial(copied, before=8), X)
    assert found.requested == found.moved == 2 * WHOLE - 8 * LINE


def test_a_halo_is_asked_for_by_both_and_comes_from_the_cache(monkeypatch):
    def halo(x_ref, out_ref):
        row, column = rows(pl.program_id(0) * TILE)
        x = triton.load(x_ref.at[row, column])
        before, column = rows(pl.program_id(0) * TILE - 4, 4)
        some = triton.load(x_ref.at[before, column], mask=(before >= 0) & (column >= 0), other=0)
        triton.store(out_ref.at[row, column], x + some.sum())

    extra = 3 * 4 * LINE
    found = run(halo, X)
    assert (found.requested, found.moved) == (2 * WHOLE + extra, 2 * WHOLE)
    # A cache that is full after a program's own rows has lost them when the next one wants the last of them.
    monkeypatch.setattr(module, "CACHE", 2 * TILE * LINE - 1)  # two tiles
    assert run(halo, X).moved == 2 * WHOLE + extra


def test_loops_turn_as_often_as_the_integers_say():
    def gathered(counts_ref, x_ref, out_ref):
        def step(i, total):
            row, column = rows(i, 1)
            return total + triton.load(x_ref.at[row, column])

        total = jax.lax.fori_loop(0, counts_ref[pl.program_id(0)], step, jnp.zeros((1, 32), jnp.float32))
        row, column = rows(pl.program_id(0), 1)
        triton.store(out_ref.at[row, column], total)

    found = run(gathered, np.array([3, 0, 5, 2], np.int32), X)
    assert found.requested == (3 + 0 + 5 + 2) * LINE + 4 * LINE + 4 * 4
    assert found.moved == (5 + 4 + 1) * LINE  # the numbers are a line


def test_a_branch_that_is_not_taken_moves_nothing():
    def some(x_ref, out_ref):
        first = pl.program_id(0) * TILE

        @pl.when(first >= 3 * TILE)
        def _():
            row, column = rows(first)
            triton.store(out_ref.at[row, column], triton.load(x_ref.at[row, column]))

    assert run(some, X).moved == 2 * TILE * LINE


def test_integers_are_computed_on_the_way_to_a_kernel():
    def function(x, sizes):
        starts = jnp.cumsum(sizes) - sizes

        def kernel(starts_ref, x_ref, out_ref):
            row, column = rows(starts_ref[pl.program_id(0)], 1)
            triton.store(out_ref.at[row, column], triton.load(x_ref.at[row, column]))

        run = functools.partial(launch, kernel, name="toy", grid=(3,), out_shape=X, warps=4, architecture="rocm")
        return jax.jit(run)(starts.astype(jnp.int32), jnp.exp(x))

    (found,) = kernel_bytes(function, X, np.array([0, 0, 7], np.int32))
    assert (found.requested, found.moved) == (6 * LINE + 3 * 4, 2 * LINE + LINE)


def test_a_kernel_in_a_scan_is_walked_through_each_turn():
    def function(x, stack):
        def body(carry, one):
            call = functools.partial(launch, copied, name="toy", grid=(4,), out_shape=X, warps=4, architecture="rocm")
            return call(carry) + one, carry.sum()

        return jax.lax.scan(body, x, stack)

    found = kernel_bytes(function, X, jax.ShapeDtypeStruct((3,), jnp.float32))
    assert [one.moved for one in found] == [2 * WHOLE] * 3


def test_what_reaches_beyond_an_array_is_told():
    with pytest.raises(ValueError, match=r"beyond an array of shape \(64, 32\)"):
        run(copied, X, grid=(5,))


def test_what_depends_on_floats_is_told():
    def looped(x_ref, out_ref):
        end = x_ref[0, 0].astype(jnp.int32)
        out_ref[0, 0] = jax.lax.fori_loop(0, end, lambda _, total: total + 1.0, 0.0)

    def placed(x_ref, out_ref):
        row, column = rows(x_ref[0, 0].astype(jnp.int32))
        triton.store(out_ref.at[row, column], jnp.zeros((TILE, 32), jnp.float32))

    def chosen(x_ref, out_ref):
        @pl.when(x_ref[0, 0] > 0)
        def _():
            out_ref[0, 0] = 0.0

    for kernel in (looped, placed, chosen):
        with pytest.raises(ValueError, match="depend"):
            run(kernel, X)


def small(name):
    case = cases(SMALL, "bfloat16")[name]
    function, arguments = passes(case, kernels("interpret"))
    return kernel_bytes(function, *arguments)


def test_the_norm_moves_what_it_must():
    (found,) = small("residual_norm")
    case = cases(SMALL, "bfloat16")["residual_norm"]
    assert found.least == case.bytes
    assert found.moved <= 1.01 * found.least


@pytest.mark.soak
@pytest.mark.parametrize("name", list(cases(SMALL, "bfloat16")))
def test_every_kernel_can_be_walked_through(name):
    for found in small(name):
        assert 0 < found.moved <= found.requested + LINE * found.programs, found
