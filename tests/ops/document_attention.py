"""Attention to one document in numpy, of which tests make what the vendors' libraries document."""

import functools

import jax
import numpy as np
from hypothesis import strategies as st

from pallas_kernels.tiles import Tile, Tuned
from tests.ops.test_attention_kernel import BF16, TOLERANCE, Case, check, documents, draw_arrays, exact, print_case
from zaya_jax.ops.attention import attention
from zaya_jax.ops.packing import pack
from zaya_jax.ops.registry import OPERATIONS

ROOMY = Tuned("interpret", (("packed_documents", Tile((6,), 1)),), "bfloat16")  # a document for each 6 tokens


def differentiated(attend, window, q, k, v, do, *segments):
    options = dict(zip(("query_segments_bs", "key_segments_bt"), segments, strict=True))
    out, back = jax.vjp(lambda *x: attend(*x, window=window, **options), q, k, v)
    return out, back(do)


def scores_of(q, k, window, scale):
    """Scores [h, n, n] of queries [n, h, c] and keys [n, kv, c]; -∞ for keys that a query does not see."""
    query, key = np.arange(len(q))[:, None], np.arange(len(q))[None]
    seen = (key <= query) & ((key > query - window) if window else True)
    return np.where(seen, np.einsum("qhc,khc->hqk", q, repeat(k, q)) * scale, -np.inf)


def repeat(k, q):
    """Keys for each query head."""
    return np.repeat(k, q.shape[1] // k.shape[1], axis=1)


def attend(q, k, v, window, scale):
    """The output [n, h, c], and the log-sum-exp [h, n]."""
    scores = scores_of(q, k, window, scale)
    lse = np.log(np.exp(scores).sum(-1))
    return np.einsum("hqk,khc->qhc", np.exp(scores - lse[..., None]), repeat(v, q)), lse


def attend_backward(q, k, v, o, lse, do, window, scale):
    """The gradients of queries, keys and values."""
    p = np.exp(scores_of(q, k, window, scale) - lse[..., None])
    ds = p * (np.einsum("qhc,khc->hqk", do, repeat(v, q)) - (do * o).sum(-1).T[..., None]) * scale
    dk, dv = np.einsum("hqk,qhc->khc", ds, q), np.einsum("hqk,qhc->khc", p, do)
    shared = (len(q), k.shape[1], q.shape[1] // k.shape[1], q.shape[2])
    return np.einsum("hqk,khc->qhc", ds, repeat(k, q)), dk.reshape(shared).sum(2), dv.reshape(shared).sum(2)


@functools.cache
def compiled(name, window):
    run = OPERATIONS["attention"].kernel(name).run
    return jax.jit(functools.partial(differentiated, functools.partial(run, ROOMY), window))


@functools.cache
def reference(window):
    return jax.jit(functools.partial(differentiated, attention, window))


def check_packed(name, window, segments, seed, heads=(6, 2, 16), key_segments=None):
    """A kernel by name equals the reference in both passes; returns the error, 1 for the largest that is allowed."""
    key_segments, (b, s) = segments if key_segments is None else key_segments, segments.shape
    arrays = draw_arrays(seed, Case(b, s, s, *heads, window, BF16))
    out, gradients = compiled(name, window)(*arrays, segments, key_segments)
    with jax.enable_x64(True):
        expected, of_reference = reference(window)(*exact(arrays), segments, key_segments)
    errors = [check(out, expected, TOLERANCE[BF16][0])]
    assert not np.any(np.asarray(out)[segments == 0])
    for ours, theirs in zip(gradients, of_reference, strict=True):
        errors.append(check(ours, theirs, TOLERANCE[BF16][1]))
    return max(errors)


# Rows, tokens of each, heads of queries and of keys, channels; each is compiled with each window.
SHAPES = [
    (1, 12, 2, 1, 64),
    (1, 48, 6, 2, 16),
    (2, 48, 2, 2, 32),
    (2, 72, 3, 1, 16),
    (3, 48, 4, 2, 16),
    (3, 16, 1, 1, 32),
]


def check_any_packed(name, data, seed):
    """The same in a drawn shape: what does not fit, as keys of other documents, runs the Pallas kernels."""
    rows, s, h, k, c = data.draw(st.sampled_from(SHAPES))
    window = data.draw(st.sampled_from([None, 1, 17, 60]))
    segments = data.draw(documents(rows, s, (1, 7, 17, 24, 60)))
    segments[: data.draw(st.sampled_from([0, 0, 0, 1]))] = 0
    keys = data.draw(st.one_of(st.just(segments), st.just(segments), documents(rows, s)))
    error = check_packed(name, window, segments, seed, (h, k, c), keys)
    fits = pack(segments, keys, rows * max(s // 6, 2)).fits
    print_case(f"{name} {'computes' if fits else 'refuses'}", segments, error)
