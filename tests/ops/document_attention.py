"""Attention to one document in numpy, of which tests make what the vendors' libraries document."""

import functools

import jax
import numpy as np

from pallas_kernels.tiles import Tile, Tuned
from tests.ops.test_attention_kernel import BF16, TOLERANCE, Case, check, draw_arrays, exact
from zaya_jax.ops.attention import attention
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


def check_packed(name, window, segments, seed):
    """A kernel by name equals the reference in both passes, with 48 tokens a row."""
    arrays = draw_arrays(seed, Case(len(segments), 48, 48, 6, 2, 16, window, BF16))
    out, gradients = compiled(name, window)(*arrays, segments, segments)
    with jax.enable_x64(True):
        expected, of_reference = differentiated(attention, window, *exact(arrays), segments, segments)
    check(out, expected, TOLERANCE[BF16][0])
    assert not np.any(np.asarray(out)[segments == 0])
    for ours, theirs in zip(gradients, of_reference, strict=True):
        check(ours, theirs, TOLERANCE[BF16][1])
