"""Keys and values that go round are all seen, and their gradients come home."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from tests.helpers import assert_close
from tests.train_helpers import fast_jit, on_devices
from zaya_jax.config import ParallelConfig
from zaya_jax.ops.attention import attention, partial_attention, partial_attention_gradient
from zaya_jax.parallel.context import gather_sequence, gathered_attention, sequence_order
from zaya_jax.parallel.mesh import make_mesh
from zaya_jax.parallel.ring import Ring, ring_attention

B, S, H, K, C = 2, 24, 4, 2, 8


def problem(seed):
    rng = np.random.default_rng(seed)
    q, k, v, out = (rng.normal(size=(B, S, heads, C)) for heads in (H, K, K, H))
    segments = np.sort(rng.integers(0, 4, (B, S)), -1)[:, ::-1].astype(np.int32)  # documents, then padding
    return q, k, v, out, segments.copy()


def differentiated(function):
    def both(q, k, v, out, segments):
        def loss(q, k, v):
            result = function(q, k, v, segments)
            return (result * out).sum(), result

        grads, result = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(q, k, v)
        return (result, *grads)

    return both


def over_devices(cases, names):
    """Output and gradients of ring or gathered attention, brought back into order, and those of one device."""
    pairs = []
    with jax.enable_x64(True):
        for seed, context, layout, window in cases:
            config = ParallelConfig(context=context, context_layout=layout)
            operands = problem(seed)
            order = sequence_order(config, S)
            order = np.arange(S) if order is None else order

            def full_attention(q, k, v, segments, window=window):
                return attention(q, k, v, query_segments_bs=segments, key_segments_bt=segments, window=window)

            def ring(q, k, v, segments, config=config, window=window):
                attend = ring_attention(Ring(config, partial_attention, partial_attention_gradient))
                return attend(q, k, v, query_segments_bs=segments, key_segments_bt=segments, window=window)

            def gather(q, k, v, segments, config=config, window=window):
                return gathered_attention(config, attention)(
                    q, k, v, query_segments_bs=segments, key_segments_bt=gather_sequence(config, segments),
                    window=window,
                )  # fmt: skip

            alone = fast_jit(differentiated(full_attention))(*operands)
            spec = PartitionSpec(None, "context")
            mesh = make_mesh(config, jax.devices()[:context])
            for name in names:
                function = differentiated({"ring": ring, "gather": gather}[name])
                spread = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
                out = jax.device_get(fast_jit(spread)(*(x[:, order] for x in operands)))
                back = [x[:, np.argsort(order)] for x in out]
                pairs.append([(x, np.asarray(y)) for x, y in zip(back, alone, strict=True)])
    return pairs


def test_a_ring_is_attention_and_so_are_its_gradients():
    """The step of tests/parallel/test_layout.py gathers."""
    check([(0, 4, "zigzag", 7)], ["ring"])


@pytest.mark.soak
def test_ring_and_gather_of_more_cases_are_attention():
    cases = [(0, 4, "zigzag", None), (1, 4, "contiguous", 5), (2, 3, "zigzag", 7), (3, 2, "zigzag", None)]
    check(cases, ["ring", "gather"])


def check(cases, names):
    for pairs in on_devices(8, "tests.parallel.test_ring:over_devices", cases, names):
        for spread, alone in pairs:
            assert_close(spread, alone, 1e-12)
