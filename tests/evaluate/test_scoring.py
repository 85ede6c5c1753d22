"""Scores of continuations: equal to the logits, in any order, grouped or not, on any number of devices."""

import functools

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.generate.engine_helpers import compilations
from tests.helpers import jit, random_model, tiny_config
from tests.train_helpers import on_devices
from zaya_jax.config import ParallelConfig
from zaya_jax.errors import InputError
from zaya_jax.evaluate import scoring
from zaya_jax.evaluate.scoring import Request, Score, Scorer, windows
from zaya_jax.evaluate.writing import Prompt, Writer, prompt_seed
from zaya_jax.generate.engine import Continuation, Engine, Update
from zaya_jax.generate.placement import decode_placement
from zaya_jax.generate.sampling import Sampling
from zaya_jax.model.zaya import Zaya, logits

TOKENS = st.lists(st.integers(0, 36), min_size=1, max_size=9)
LENGTH = 24


@functools.cache
def scorer(max_length: int = LENGTH) -> Scorer:
    """Rows of 8 and 24 tokens, two and one in a batch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scoring, "ROW", 8)
        return make_scorer(random_model(tiny_config()), max_length=max_length, tokens=16)


def make_scorer(model: Zaya, **options) -> Scorer:
    """A scorer on all devices here."""
    return Scorer(model, decode_placement(model, ParallelConfig()), **options)


def requests(count: int, seed: int = 0, longest: int = 30) -> list[Request]:
    draw = np.random.default_rng(seed)
    lengths = zip(draw.integers(1, longest, count), draw.integers(1, 6, count), strict=True)
    return [Request(*(draw.integers(0, 37, size).tolist() for size in pair)) for pair in lengths]


@jit
def all_logprobs(model, tokens):
    return jax.nn.log_softmax(logits(model, tokens))


def expected(request: Request) -> Score:
    """From the logits of the last `LENGTH` tokens alone."""
    row = [*request.context, *request.continuation][-(LENGTH + 1) :]
    inputs, count = row[:-1], len(request.continuation)
    padded = np.zeros((1, LENGTH), np.int32)
    padded[0, : len(inputs)] = inputs
    table = np.asarray(all_logprobs(scorer().model, padded))[0, len(inputs) - count : len(inputs)]
    values = table[np.arange(count), request.continuation]
    return Score(values.sum(), bool((table.argmax(-1) == request.continuation).all()))


def assert_same(scores, others):
    np.testing.assert_allclose([s.logprob for s in scores], [s.logprob for s in others], rtol=0, atol=1e-4)
    assert [s.is_greedy for s in scores] == [s.is_greedy for s in others]


def test_scores_are_those_of_the_logits_and_long_contexts_lose_their_beginning():
    asked = requests(30)
    assert max(len(r.context) + len(r.continuation) for r in asked) > LENGTH + 1
    greedy = asked[0]._replace(continuation=[next(t for t in range(37) if expected(Request(asked[0].context, [t]))[1])])
    scores = scorer().score([*asked, greedy])
    assert_same(scores, [expected(request) for request in [*asked, greedy]])
    assert scores[-1].is_greedy
    cut = [r._replace(context=[*r.context][-(LENGTH + 1 - len(r.continuation)) :]) for r in asked]
    assert_same(scores, [*scorer().score(cut), scores[-1]])


@given(st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_neither_order_nor_neighbours_change_a_score(pairs, random):
    asked = [Request(*pair) for pair in pairs]
    shuffled = random.sample(range(len(asked)), len(asked))
    scores = scorer().score(asked)
    assert_same(scorer().score([asked[index] for index in shuffled]), [scores[index] for index in shuffled])
    assert_same(scorer().score(asked[:1]), scores[:1])


@given(TOKENS, st.lists(st.integers(0, 36), min_size=1, max_size=40), st.lists(TOKENS, max_size=3))
def test_answers_to_one_question_score_as_if_they_were_alone(context, letters, longer):
    asked = [*(Request(context, [letter]) for letter in letters), *(Request(context, tokens) for tokens in longer)]
    assert_same(scorer().score(asked), [scorer().score([each])[0] for each in asked])


def test_answers_to_one_question_are_one_document():
    asked = [Request([1, 2, 3], [letter]) for letter in range(4)]
    (document,) = scoring._documents(asked, LENGTH, 8)
    assert document.requests == [0, 1, 2, 3]
    many = scoring._documents([Request([1], [letter]) for letter in range(37)], LENGTH, 8)
    assert [document.queries for document in many] == [8, 8, 8, 8, 5]


def test_requests_of_every_length_need_one_compilation_per_length_of_rows():
    before = scoring.score_batch._cache_size()
    fresh = Scorer(scorer().model, scorer().placement, max_length=23, tokens=23)
    for longest in (2, 5, 9, 30):
        fresh.score(requests(7, longest, longest))
    assert fresh.lengths == [23]
    assert scoring.score_batch._cache_size() == before + 1
    assert scorer().lengths == [8, LENGTH]


def test_progress_reaches_the_end():
    seen = []
    scorer().score(requests(9), progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (9, 9)
    assert seen == sorted(seen)


@pytest.mark.parametrize("empty", [Request([], [1]), Request([1], []), Request([1], [1] * (LENGTH + 1))])
def test_what_cannot_be_scored_is_an_error(empty):
    message = (
        f"score {len(empty.continuation)} tokens? after {len(empty.context)} tokens? .* must ask for 1 to {LENGTH} "
    )
    with pytest.raises(InputError, match=message):
        scorer().score([empty])


@given(st.lists(st.integers(1, 36), max_size=30), st.integers(1, 9))
def test_windows_predict_each_token_once_with_all_the_context_that_fits(tokens, length):
    parts, before = list(windows(tokens, 0, length)), [0]
    for context, continuation in parts:
        assert list(context) == [*before][-len(context) :]
        assert len(context) + len(continuation) - 1 <= length
        before += continuation
    assert before == [0, *tokens]
    if len(tokens) > length:
        last = parts[-1]
        assert len(last.context) + len(last.continuation) - 1 == length


# --- continuations ---------------------------------------------------------------------------------------------


class Letters:
    """Token i is the i-th character from 'A' on."""

    def decode_after(self, before, tokens):
        return "".join(chr(65 + token) for token in tokens)


def prompts(count: int = 11) -> list[Prompt]:
    sampled = Sampling(0.8, top_p=0.9)
    return [Prompt(request.context, prompt_seed(0, str(index), 0), 9, sampled if index % 3 else Sampling(),
                   ("A", "BC") if index % 2 else ())
            for index, request in enumerate(requests(count, longest=120))]  # fmt: skip


def writer(model: Zaya) -> Writer:
    shared = make_scorer(model, tokens=64)
    return Writer(shared.model, Letters(), [7], shared.placement, 2)


def test_continuations_depend_neither_on_the_batch_nor_on_its_order():
    ready = writer(random_model(tiny_config("bare", max_positions=256)))
    seen = []
    written = ready.write(prompts(), progress=lambda *counts: seen.append(counts))
    assert compilations(ready._engine) == [2, 1]  # two sizes of chunks
    assert seen == sorted(seen)
    assert seen[-1] == (11, 11)
    assert ready.write(prompts()[::-1]) == written[::-1]
    assert ready.write(prompts()[3:8]) == written[3:8]
    assert len({tuple(tokens) for tokens in written}) > 5


def on_one_or_more() -> tuple[list[Score], list[list[int]], set[int]]:
    """What all devices here score and, by a stand-in, write; and the numbers of rows in batches."""
    model, rows = random_model(tiny_config()), set()
    asked = [*requests(40), *(Request([1, 2], [letter]) for letter in range(9))]

    def updates(engine):
        rows.add(engine.slots)
        for handle, request in list(engine._requests.items()):
            tokens = [sum(request.prompt) % 37, request.seed % 37, request.max_new_tokens]
            yield Update(handle, Continuation(tokens, [], stopped=True), finished=True)
            engine.cancel(handle)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "updates", updates)
        patch.setattr(scoring, "ROW", 8)
        return make_scorer(model, max_length=LENGTH, tokens=16).score(asked), writer(model).write(prompts()), rows


def test_several_devices_score_and_write_what_one_does():
    scores, written, (rows,) = on_one_or_more()
    others, also, (shared,) = on_devices(8, "tests.evaluate.test_scoring:on_one_or_more")
    assert_same([Score(*score) for score in others], scores)
    assert also == written
    assert (rows, shared) == (2, 16)
