"""An engine's requests: independent of each other, in any order, and without work that was done before."""

import functools
import re
import sys
from collections import Counter
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.generate.engine_helpers import CHUNK, compilations, fast_engine, patch_engine  # noqa: F401
from tests.helpers import random_model, tiny_config
from zaya_jax.errors import InputError
from zaya_jax.generate import engine as module
from zaya_jax.generate.engine import Engine, least_rows, make_rows
from zaya_jax.generate.sampling import Sampling
from zaya_jax.generate.steps import BLOCK

# A layer with a window, and one without.
CONFIG = tiny_config("sliding", num_layers=2)
SLOTS, LENGTH = 3, 32
pytestmark = pytest.mark.usefixtures("fast_engine")


class Asked(NamedTuple):
    """A request: its prompt, number of new tokens, sampling and seed."""

    prompt: list[int]
    new: int
    sampling: Sampling
    seed: int


HOT = Sampling(1.5, top_k=20, top_p=0.9, repetition_penalty=1.2)
POOL = [
    Asked(np.random.default_rng(index).integers(0, CONFIG.vocab_size, size).tolist(), new, sampling, index)
    for index, (size, new, sampling) in enumerate(
        [(1, 9, Sampling()), (4, 1, Sampling()), (5, 20, HOT), (13, 4, Sampling(0.9)), (3, 24, Sampling()),
         (21, 7, Sampling(repetition_penalty=1.5)), (8, 2, HOT), (2, 17, Sampling(1.2, min_p=0.05))]
    )
]  # fmt: skip


@functools.cache
def engine():
    with pytest.MonkeyPatch.context() as patch:
        patch_engine(patch)
        made = Engine(random_model(CONFIG), slots=SLOTS, length=LENGTH, stop_tokens=[23])
        assert made._compiled
        return made


def submit(asked):
    return engine().submit(asked.prompt, asked.new, asked.sampling, seed=asked.seed)


@functools.cache
def alone(asked_index):
    """What a request gets with no other in the engine, in blocks of all steps."""
    submit(POOL[asked_index])
    *_, last = engine().updates()
    return last.continuation


@settings(max_examples=25)
@given(data=st.data())
def test_a_request_is_bitwise_independent_of_all_others(data):
    for handle in list(engine()._requests):  # of an example that ended early
        engine().cancel(handle)
    left = data.draw(st.permutations(range(len(POOL))), "order")
    asked, finished = {}, {}
    expected = {index: alone(index) for index in left}
    while left or engine().busy:
        for _ in range(data.draw(st.integers(0 if engine().busy else 1, 3), "joining")):
            if left:
                index = left.pop()
                asked[submit(POOL[index])] = index
        for update in engine().step(data.draw(st.sampled_from([1, 3, BLOCK]), "block")):
            whole, part = expected[asked[update.handle]], update.continuation
            assert part.tokens == whole.tokens[: len(part.tokens)]
            assert part.logprobs == whole.logprobs[: len(part.tokens)]
            if update.finished:
                finished[update.handle] = part
        if asked and data.draw(st.booleans(), "cancelling"):
            handle = sorted(asked)[data.draw(st.integers(0, len(asked) - 1), "cancelled")]
            engine().cancel(handle)
            finished.setdefault(handle, None)
    assert finished.keys() == asked.keys()
    assert all(part in (None, expected[asked[handle]]) for handle, part in finished.items())
    assert len(engine()._free) == SLOTS
    assert compilations(engine()) == [1, 1]


def test_requests_differ_and_end_in_both_ways():
    results = [alone(index) for index in range(len(POOL))]
    assert {len(result.tokens) == asked.new for result, asked in zip(results, POOL, strict=True)} == {True, False}
    assert all(result.stopped == (len(result.tokens) < asked.new) for result, asked in zip(results, POOL, strict=True))
    assert len({token for result in results for token in result.tokens}) > 10


def test_a_slot_keeps_nothing_of_the_request_before():
    expected = alone(4)
    state = engine()._state
    engine()._state = jax.tree.map(lambda x: jnp.full_like(x, True if x.dtype == bool else 10**9 if x.dtype == np.int32
                                                           else np.nan), state)  # fmt: skip
    del state
    handles = [submit(POOL[4]) for _ in range(SLOTS)]  # all slots, since there is one program for all rows
    finished = {update.handle: update.continuation for update in engine().updates() if update.finished}
    assert finished == dict.fromkeys(handles, expected)


@pytest.mark.parametrize("interrupted", ["_read", "_prefill"])
def test_an_interrupted_step_is_done_again(monkeypatch, interrupted):
    expected = {index: alone(index) for index in (2, 4)}
    asked = {submit(POOL[index]): index for index in expected}
    engine().step(3)

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine(), interrupted, interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine().step(3)
    finished = {update.handle: update.continuation for update in engine().updates() if update.finished}
    assert finished == {handle: expected[index] for handle, index in asked.items()}


def test_a_long_prompt_advances_by_a_chunk_between_the_blocks_of_others():
    long, short = Asked([3] * (3 * CHUNK), 4, Sampling(), 0), POOL[4]
    handles = [submit(long), submit(short)]
    seen = [[update.handle for update in engine().step(2)] for _ in range(3)]
    assert seen == [handles[1:], handles[1:], handles]
    for handle in handles:
        engine().cancel(handle)
    assert not engine().busy


def python_calls(work):
    """Count the calls of functions by module and name, for functions in C those of the caller."""
    calls = Counter()

    def count(frame, event, _):
        if event in ("call", "c_call"):
            calls[frame.f_globals.get("__name__", ""), frame.f_code.co_name] += 1

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def test_the_host_calls_few_functions_a_row_whatever_the_steps():
    """`python -m benchmarks engine` prints the time of all."""
    handles = [engine().submit([1], 28) for _ in range(SLOTS)]
    engine().step(1)
    one, many = (python_calls(lambda steps=steps: engine().step(steps)).total() for steps in (1, BLOCK))
    for handle in handles:
        engine().cancel(handle)
    assert max(one, many) < 100 + 40 * SLOTS


def test_what_depends_on_the_model_alone_happens_once():
    """No function of jax is traced, compiled or asked to place an array in a step; only results are read."""
    alone(2)
    submit(POOL[2])
    calls = python_calls(lambda: list(engine().updates()))
    packages = ("jax", "jaxlib", "flax", "zaya_jax")
    of_jax = {name: times for name, times in calls.items() if name[0].split(".")[0] in packages}
    of_jax = {name: times for name, times in of_jax.items() if not name[0].startswith("zaya_jax.generate.")}
    assert not {name for _, name in of_jax} & {"device_put", "trace_to_jaxpr", "lower", "compile", "flatten"}
    assert sum(of_jax.values()) < 100, of_jax  # whatever the number of parameters
    assert compilations(engine()) == [1, 1]


def test_a_cache_that_does_not_fit_is_refused_before_it_is_allocated(monkeypatch):
    expected = sum(x.nbytes for x in jax.tree.leaves(engine()._state)) if alone(0) else 0
    assert engine().cache_bytes == expected
    monkeypatch.setattr(module, "host_free_memory", lambda: (expected - 1) * jax.local_device_count())
    with pytest.raises(InputError, match=rf"The cache of {SLOTS} requests of {LENGTH} tokens takes .* are free\."):
        Engine(random_model(CONFIG), slots=SLOTS, length=LENGTH)


def test_slots_are_added_while_there_is_no_request():
    made = Engine(random_model(CONFIG), slots=1, length=9)
    made.reserve(1, 4)
    assert (made.slots, made.length) == (1, 16)  # a class of lengths
    made.submit([1], 8)
    with pytest.raises(ValueError, match="An engine with requests cannot get other slots"):
        made.reserve(2, 4)
    with pytest.raises(InputError, match=r"A prompt \(9 tokens\) and max_new_tokens=8 exceed the engine's length=16\."):
        made.submit([1] * 9, 8)
    made.cancel(1)
    made.cancel(1)
    made.reserve(2, 999)
    assert (made.slots, made.length) == (2, CONFIG.max_positions)


@pytest.mark.parametrize(("options", "match"), [
    ({"slots": 0, "length": 1}, "slots is 0, but must be at least 1"),
    ({"slots": 1, "length": 0}, "length is 0, but must be from 1 to 64"),
    ({"slots": 1, "length": 65}, "length is 65, but must be from 1 to 64"),
    ({"slots": 1, "length": 9, "stop_tokens": [400]}, "stop_tokens contains token 400"),
])  # fmt: skip
def test_bad_sizes_are_refused_in_a_sentence(options, match):
    with pytest.raises(InputError, match=match):
        Engine(random_model(CONFIG), **options)


def test_requests_past_the_slots_of_a_cpu_wait(monkeypatch):
    monkeypatch.setattr(module, "ONE_SIZE", SLOTS)
    made = Engine(random_model(CONFIG), slots=SLOTS + 2, length=LENGTH)
    for _ in range(SLOTS + 2):
        made.submit([1], 9)
    made.step(1)
    made.reserve(SLOTS + 3, LENGTH)  # an engine that has no more to give stays as it is, though busy
    assert (made.slots, len(made._running)) == (SLOTS, SLOTS)


def test_a_step_does_not_copy_the_cache():
    alone(0)
    leaves, (_, decode) = engine()._compiled
    rows = make_rows([None] * SLOTS, [0] * SLOTS, [2] * SLOTS)
    text = decode.lower(leaves, engine()._state, rows, np.array([23], np.int32), np.int32(2)).compile().as_text()
    shape = ",".join(map(str, engine()._state.cache.layers[0].kv.k_btx.shape))
    assert f"f32[{shape}]" in text
    assert not re.findall(rf"= f32\[{shape}\]\S* (?:copy|transpose)\(.*", text)


@pytest.mark.parametrize(("platform", "length", "rows"), [("cpu", 64, 1), ("cuda", 2**14, 8), ("rocm", 2**14 + 1, 2)])
def test_products_on_gpus_have_the_rows_that_xla_would_pad_them_to(platform, length, rows):
    assert least_rows(platform, length) == rows


def test_rows_of_padding_are_fewer_once_the_cache_is_long(monkeypatch):
    monkeypatch.setattr(module, "least_rows", lambda _, length: 8 if length < LENGTH else 2)
    made = Engine(random_model(CONFIG), slots=1, length=1)
    assert made.slots == 8
    made.reserve(1, LENGTH)
    assert made.slots == 2
    made.reserve(3, LENGTH)
    assert made.slots == 3
