"""The Mosaic kernels of attention: interpreted, against the reference in double precision, and lowered."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu

from pallas_kernels.attention_mosaic import attention_forward
from pallas_kernels.attention_mosaic_backward import attention_backward, backward_ranges
from pallas_kernels.attention_tiles import AttentionInputs
from tests.devices_helpers import on_devices
from tests.helpers import assert_close, jit, seeds
from tests.kernel_helpers import kernel, kernel_names, lower, shape
from tests.ops.test_attention_kernel import BF16, FLASH, Case, check, documents, draw_arrays, exact, print_case
from zaya_jax.ops.attention import PartialAttention, gradient, partial_attention, partial_attention_gradient
from zaya_jax.ops.blockwise import FLOOR
from zaya_jax.ops.registry import OPERATIONS

TILE = 64  # of queries and, when interpreted, of keys
SIZES = (1, 3, TILE - 1, TILE, TILE + 1, 3 * TILE)  # of documents
interpreter = pytest.mark.skipif(not hasattr(mosaic_gpu, "InterpretGPUParams"), reason="jax 0.10 interprets too little")


@functools.cache
def interpreted(window, dtype):
    def call(q, k, v, do, query_segments, key_segments, offset):
        x = AttentionInputs(q, k, v, query_segments, key_segments, offset, window)
        if dtype == jnp.float32:
            runs = (
                OPERATIONS[name].kernel("mosaic").run for name in ("partial_attention", "partial_attention_gradient")
            )
            part, pull = (functools.partial(run, "interpret") for run in runs)
            whole = part(x)
            return *whole, pull(x, whole, do)
        whole = PartialAttention(*attention_forward(x, dtype=dtype, architecture="interpret"))
        bounds = backward_ranges(x, architecture="interpret")
        return *whole, gradient("interpret", x, bounds, whole, do, dtype, attention_backward)

    return jit(call)


def both_passes(window, dtype, *arrays):
    """Called where the simulated warpgroups, which wait for one another, have a thread each."""
    return [jax.device_get(interpreted(window, dtype)(*arrays)) for _ in range(2)]


@functools.cache
def reference(window):
    def call(q, k, v, do, query_segments, key_segments, offset):
        x = AttentionInputs(q, k, v, query_segments, key_segments, offset, window)
        whole = partial_attention(x)
        return *whole, partial_attention_gradient(x, whole, do)

    return jit(call)


def equals_the_reference(data, seed, case, dtype, segmented=True):
    """Queries and keys are stretches of one sequence of documents, in any position to one another."""
    length = max(case.s, case.t) + TILE
    line = data.draw(documents(case.b, length, SIZES)) if segmented else np.ones((case.b, length), np.int32)
    query, key = data.draw(st.integers(0, length - case.s)), data.draw(st.integers(0, length - case.t))
    if segmented and case.b > 1:
        line[0] *= data.draw(st.sampled_from([0, 1, 1]))  # an empty row
    if not segmented:
        query, key = length - case.s, length - case.t
    arrays = [*map(np.asarray, draw_arrays(seed, case))]
    segments = line[:, query : query + case.s], line[:, key : key + case.t]
    offset = np.int32(query - key)
    passed = segments if segmented else (None, None)
    found, again = on_devices(8, f"{__name__}:both_passes", case.window, dtype, *arrays, *passed, offset)
    chex.assert_trees_all_equal(found, again)
    o, lse, gradients = found
    chex.assert_type([o, lse, *gradients], [dtype, jnp.float32, *[dtype] * 3])
    with jax.enable_x64(True):
        expected, expected_lse, expected_gradients = exact(reference(case.window)(*exact(arrays), *segments, offset))
    pairs = zip((o, *gradients), (expected, *expected_gradients), strict=True)
    errors = [check(ours, theirs, 1e-2) for ours, theirs in pairs]
    seen = expected_lse > FLOOR / 2
    assert_close(lse[seen], expected_lse[seen], 1e-5)
    assert (lse[~seen] <= FLOOR / 2).all()
    assert not np.any(o[~seen]), "a query that sees nothing has the output 0"
    assert not np.any(gradients[0][~seen])
    for of_keys in gradients[1:]:
        assert not np.any(of_keys[segments[1] == 0]), "nothing sees padding"
    print_case(f"mosaic {jnp.dtype(dtype)}", segments[0], *errors)


# Two rows of the batch; pairs of heads, of which two share a key head; tiles without a mask between masked ones.
CASES = [(Case(2, 64, 128, 2, 1, 64, None, BF16), True), (Case(1, 64, 128, 8, 2, 64, TILE + 1, BF16), True),
         (Case(1, 128, 256, 2, 1, 64, 150, BF16), False)]  # fmt: skip
slow = functools.partial(settings, phases=(Phase.generate,))  # to find a smaller example would take minutes


@interpreter
@pytest.mark.parametrize(("case", "segmented"), CASES)
@slow(max_examples=2)
@given(data=st.data(), seed=seeds())
def test_equals_the_reference(case, segmented, data, seed):
    equals_the_reference(data, seed, case, BF16, segmented)


@interpreter
@slow(max_examples=1)
@given(data=st.data(), seed=seeds())
def test_parts_and_their_gradients_equal_the_reference(data, seed):
    equals_the_reference(data, seed, Case(1, 64, 64, 2, 1, 64, None, BF16), jnp.float32)


@interpreter
@pytest.mark.soak
@pytest.mark.parametrize("part", range(10))  # each takes two minutes
@slow(max_examples=20)
@given(data=st.data(), seed=seeds())
def test_equals_the_reference_in_any_shape(part, data, seed):
    b, tiles, k, pairs = (data.draw(st.integers(1, most)) for most in (2, 3, 2, 2))
    window = data.draw(st.sampled_from([None, None, 1, TILE - 1, TILE, TILE + 1, 200]))
    t, c = TILE * data.draw(st.integers(1, 4)), data.draw(st.sampled_from([64, 128]))
    case = Case(b, TILE * tiles, t, 2 * pairs * k, k, c, window, BF16)
    equals_the_reference(data, seed, case, data.draw(st.sampled_from([BF16, jnp.float32])), data.draw(st.booleans()))


def arguments(s=8192, h=8, c=128, dtype=BF16):
    q, k = shape(2, s, h, c, dtype=dtype), shape(2, s, 2, c, dtype=dtype)
    return q, k, k


def loss(q, k, v):
    return kernel("attention", "h200", "mosaic")(q, k, v).astype(jnp.float32).sum()


def test_a_training_step_runs_the_mosaic_kernels_alone():
    step = lower(jax.grad(loss, (0, 1, 2)), *arguments(), platform="cuda")
    assert kernel_names(step) == []
    assert step.as_text().count("mosaic_gpu_v2") == 3


@pytest.mark.parametrize("s", [1, 63, 8192 + 64])
def test_what_is_no_whole_number_of_tiles_runs_the_other_kernels(s):
    step = lower(jax.grad(loss, (0, 1, 2)), *arguments(s), platform="cuda")
    assert kernel_names(step) == FLASH
    assert "mosaic_gpu_v2" not in step.as_text()


@pytest.mark.parametrize(
    ("change", "message"),
    [({"dtype": jnp.float32}, "need bfloat16, not float32"), ({"c": 32}, "64 or 128 channels, not 32"),
     ({"h": 6}, "even number of query heads per key head, not 3")],
)  # fmt: skip
def test_what_the_kernel_cannot_do_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        kernel("attention", "h200", "mosaic")(*(jnp.zeros(x.shape, x.dtype) for x in arguments(**{"s": 64} | change)))


def test_other_gpus_are_refused():
    assert "for sm_90" in OPERATIONS["attention"].kernel("mosaic").supports("sm_100", *arguments())
