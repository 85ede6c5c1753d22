"""Rows split over `data`, caches split over `context`: the tokens, logits and caches of one device."""

import functools
import math
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from tests.helpers import assert_close, random_model, tiny_config
from tests.hlo_helpers import collectives
from tests.train_helpers import fast_jit, on_devices
from zaya_jax.config import ParallelConfig
from zaya_jax.errors import InputError
from zaya_jax.generate import decode
from zaya_jax.generate.placement import decode_mesh, decode_placement
from zaya_jax.generate.sampling import Sampling
from zaya_jax.lab.predict.compilers.hlo import arrays
from zaya_jax.model.attention import KeyValues

STEPS, BLOCK, CHUNK = 9, 4, 4
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
_STATIC = {"_prefill": ("placement",), "_decode": ("size", "branches", "placement")}


class Generated(NamedTuple):
    """What was generated, and the states of the devices.

    Attributes:
      rows: the continuations.
      logits: fp32 [1 + blocks, rows, v], after the prompts and after each block.
      steps: the number of tokens that each device counts, after each block.
      kv: keys and values [rows, slots, k·c] of each layer at the end.
      kv_bytes: the bytes of each on each device.
      hlo: the compiled `_decode`.
    """

    rows: list[decode.Continuation]
    logits: np.ndarray
    steps: list[list[int]]
    kv: list[np.ndarray]
    kv_bytes: list[list[int]]
    hlo: str

    @property
    def tokens(self):
        return [row.tokens for row in self.rows]


class Recorder:
    """`_prefill` or `_decode`, whose program and states are kept; each program is compiled once."""

    def __init__(self, name: str) -> None:
        self.function = fast_jit(getattr(decode, name).__wrapped__, static_argnames=_STATIC[name], donate_argnums=1)
        self.programs: dict[Any, Any] = {}
        self.hlo, self.logits = "", []

    def __call__(self, model: Any, state: Any, *arguments: Any, **static: Any) -> Any:
        key = tuple(static.values())
        if key not in self.programs:
            self.programs[key] = self.function.lower(model, state, *arguments, **static).compile()
            self.hlo = self.programs[key].as_text()
        if not self.logits and isinstance(state, decode.DecodeState):
            self.logits.append(np.array(state.logits_bv))  # after the prompts
        self.state, *rest = self.programs[key](model, state, *arguments)
        self.logits.append(np.array(getattr(self.state, "logits_bv", 0)))
        return self.state, *rest


def generate_on(layout):
    """`Generated` by kind on one layout: to the end, and where the stop token of `stop_token` ends rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "CHUNK", CHUNK)
        for name in _STATIC:
            patch.setattr(decode, name, Recorder(name))
        model, (data, context) = random_model(CONFIG), LAYOUTS[layout]
        run = functools.partial(_generated, decode_placement(model, ParallelConfig(data=data, context=context)), model)
        whole = run()
        return {"whole": whole, "stopped": run(stop_tokens=[stop_token(whole)])}


def stop_token(whole):
    """A token of the first row, but not of the second."""
    first, second, _ = whole.tokens
    return next(token for token in first if token not in second)


def _generated(placement, model, **options):
    recorder, steps, last = decode._decode, [], []
    recorder.logits = []
    for rows in decode.continuations(model, PROMPTS, STEPS, HOT, seeds=SEEDS, placement=placement, block=BLOCK,
                                     **options):  # fmt: skip
        last = rows
        steps.append([int(shard.data) for shard in recorder.state.step.addressable_shards])
    layers = jax.tree.leaves(recorder.state.cache.layers, is_leaf=lambda x: isinstance(x, KeyValues))
    kv = [x for layer in layers if isinstance(layer, KeyValues) for x in layer]
    count = len(PROMPTS)
    return Generated(last, np.stack([x[:count] for x in recorder.logits]), steps, [np.array(x)[:count] for x in kv],
                     [[shard.data.nbytes for shard in x.addressable_shards] for x in kv], recorder.hlo)  # fmt: skip


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
    assert len(ours.logits) == 1 + math.ceil(STEPS / BLOCK)
    assert_close(ours.logits, one.logits, 1e-5)
    assert_close([np.array(row.logprobs) for row in ours.rows], [np.array(row.logprobs) for row in one.rows], 1e-5)


@pytest.mark.parametrize("layout", SHARDED)
def test_the_loop_of_a_shard_ends_with_its_rows(layout):
    ours, one = on(layout, "stopped"), on("one", "stopped")
    assert [(row.tokens, row.stopped) for row in ours.rows] == [(row.tokens, row.stopped) for row in one.rows]
    assert [row.stopped for row in one.rows[:2]] == [True, False]
    devices = math.prod(LAYOUTS[layout])
    assert ours.steps == [[min(end, STEPS)] * devices for end in range(BLOCK, STEPS + BLOCK, BLOCK)]


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
    assert [kv.shape[1] for kv in one.kv[::2]] == [32 if full else CONFIG.sliding_window for full in FULL]


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
