"""Rows split over `data`, caches split over `context`: the tokens, logits and caches of one device."""

import functools
import math
from typing import NamedTuple

import jax
import numpy as np
import pytest

from tests.generate.engine_helpers import patch_engine
from tests.helpers import assert_close, random_model, tiny_config
from tests.hlo_helpers import collectives
from tests.train_helpers import on_devices
from zaya_jax.config import ParallelConfig
from zaya_jax.errors import InputError
from zaya_jax.generate.decode import continuations
from zaya_jax.generate.engine import Continuation, Engine, make_rows
from zaya_jax.generate.placement import decode_mesh, decode_placement
from zaya_jax.generate.sampling import Sampling
from zaya_jax.lab.predict.compilers.hlo import arrays
from zaya_jax.model.attention import KeyValues

STEPS, BLOCK = 9, 4
PROMPTS = [[5, 17, 25], [9], [3, 3, 8, 12, 30, 7, 29]]  # no layout divides them
SEEDS = [4, 11, 7]
HOT = Sampling(temperature=2.0, top_p=0.95, repetition_penalty=1.3)
# A full-attention layer and one with a window: a decode step is compiled layer by layer.
CONFIG = tiny_config("sliding", num_layers=2)
FULL = [kind.window is None for kind in CONFIG.layer_kinds * CONFIG.num_groups]
# Data and context. With four shards, one has nothing but a row that fills the batch up.
LAYOUTS = {"one": (1, 1), "data4_context2": (4, 2), "data2": (2, 1), "context4": (1, 4)}
SHARDED = [name if name == "data4_context2" else pytest.param(name, marks=pytest.mark.soak)
           for name in LAYOUTS if name != "one"]  # fmt: skip


class Generated(NamedTuple):
    """What was generated, and the states of the devices.

    Attributes:
      rows: the continuations.
      kv: keys and values [rows, slots, k·c] of each layer at the end.
      kv_bytes: the bytes of each on each device.
      state_bytes: those of the whole state, and how many the engine announced.
      hlo: the compiled decode program.
    """

    rows: list[Continuation]
    kv: list[np.ndarray]
    kv_bytes: list[list[int]]
    state_bytes: tuple[list[int], int]
    hlo: str

    @property
    def tokens(self):
        return [row.tokens for row in self.rows]


def generate_on(layout):
    """`Generated` by kind on one layout: to the end, and where the stop token of `stop_token` ends rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch_engine(patch)
        model, (data, context) = random_model(CONFIG), LAYOUTS[layout]
        placement = decode_placement(model, ParallelConfig(data=data, context=context))
        whole = generated(model, placement, -1)
        return {"whole": whole, "stopped": generated(model, placement, stop_token(whole))}


def stop_token(whole):
    """A token of the first row, but not of the second."""
    first, second, _ = whole.tokens
    return next(token for token in first if token not in second)


def generated(model, placement, stop):
    engine = Engine(model, placement, slots=3, length=16, stop_tokens=[stop] if stop >= 0 else [])
    slots = list(engine._free)[: len(PROMPTS)]
    *_, rows = continuations(engine, PROMPTS, STEPS, HOT, seeds=SEEDS, block=BLOCK)
    layers = jax.tree.leaves(engine._state.cache.layers, is_leaf=lambda x: isinstance(x, KeyValues))
    kv = [x for layer in layers if isinstance(layer, KeyValues) for x in layer]
    arguments = make_rows([None] * engine.slots, [0] * engine.slots, [0] * engine.slots), np.array([-1], np.int32)
    leaves, programs = engine._compiled
    hlo = programs.decode.lower(leaves, engine._state, *arguments, np.int32(1)).compile().as_text()
    state = [sum(x.addressable_shards[device].data.nbytes for x in jax.tree.leaves(engine._state))
             for device in range(placement.mesh.size)]  # fmt: skip
    return Generated(rows, [np.array(x)[slots] for x in kv],
                     [[shard.data.nbytes for shard in x.addressable_shards] for x in kv],
                     (state, engine.cache_bytes), hlo)  # fmt: skip


def on(layout, kind="whole"):
    return _everything(layout)[kind]


@functools.cache
def _everything(layout):
    return on_devices(8, "tests.generate.test_sharded_decode:generate_on", layout)


@pytest.mark.parametrize("layout", SHARDED)
def test_ragged_prompts_in_chunks_continue_as_on_one_device(layout):
    ours, one = on(layout), on("one")
    assert ours.tokens == one.tokens
    assert len({token for row in ours.tokens for token in row}) > 4
    assert_close([np.array(row.logprobs) for row in ours.rows], [np.array(row.logprobs) for row in one.rows], 1e-5)


@pytest.mark.parametrize("layout", SHARDED)
def test_rows_end_on_the_shards_that_have_them(layout):
    ours, one = on(layout, "stopped"), on("one", "stopped")
    assert [(row.tokens, row.stopped) for row in ours.rows] == [(row.tokens, row.stopped) for row in one.rows]
    assert [row.stopped for row in one.rows[:2]] == [True, False]


@pytest.mark.parametrize("layout", SHARDED)
def test_a_layer_of_a_decode_step_has_three_reductions_and_nothing_else_is_sent(layout):
    data, context = LAYOUTS[layout]
    result = collectives(on(layout).hlo, {"data": data, "fsdp": 1, "expert": 1, "context": context})
    if context == 1:
        assert not result
        return
    # Maximum, sum of weights, weighted sum of values; the compiler sends the sums, which are independent, together.
    assert {(call.kind, call.over, call.loops) for call in result} == {("all-reduce", ("context",), (math.inf,))}
    assert sum(len(arrays(call.shape)) for call in result) == 3 * sum(FULL)
    rows = -(-len(PROMPTS) // data)
    values = rows * CONFIG.num_query_heads * (CONFIG.head_dim + 2)  # whatever the cache's length
    assert sum(call.bytes for call in result) == 4 * values * sum(FULL)


@pytest.mark.parametrize("layout", SHARDED)
def test_each_device_holds_its_slots_of_its_rows(layout):
    data, context = LAYOUTS[layout]
    ours, one = on(layout), on("one")
    rows = -(-len(PROMPTS) // data)
    for index, (kv, expected) in enumerate(zip(ours.kv, one.kv, strict=True)):
        assert_close(kv, expected, 1e-5)
        (whole,) = one.kv_bytes[index]
        share = whole // len(PROMPTS) * rows // (context if FULL[index // 2] else 1)  # keys, then values
        assert ours.kv_bytes[index] == [share] * (data * context)
    assert [kv.shape[1] for kv in one.kv[::2]] == [16 if full else CONFIG.sliding_window for full in FULL]
    announced = [[size] * len(states) for states, size in (ours.state_bytes, one.state_bytes)]
    assert announced == [ours.state_bytes[0], one.state_bytes[0]]


@pytest.mark.parametrize(
    ("parallel", "where", "match"),
    [
        (ParallelConfig(context=3), "parallel.", r"parallel\.context is 3, but must be a divisor of \d, the number"),
        (ParallelConfig(data=4, context=3), "--", r"--data 4 × --context 3 is 12, but must be at most \d, the number"),
        (ParallelConfig(data=0), "--", "--data is 0, but must be at least 1"),
        (ParallelConfig(context=-1), "--", "--context is -1, but must be at least 1"),
        (ParallelConfig(fsdp=2), "parallel.", r"parallel\.fsdp is 2, but must be 1 to generate"),
        (ParallelConfig(expert=2), "parallel.", r"parallel\.expert is 2, but must be 1 to generate"),
    ],
)
def test_a_layout_without_devices_is_refused_in_a_sentence(parallel, where, match):
    with pytest.raises(InputError, match=rf"{match}.*\.$"):
        decode_mesh(parallel, where)


def test_devices_that_context_leaves_split_the_rows():
    assert decode_mesh(ParallelConfig()).size == jax.local_device_count()
