import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zaya_jax.data.windows import Windows


class Numbered:
    """Documents whose tokens are 1, 2, 3, … through all of them: a token says where it stands."""

    def __init__(self, lengths):
        self.lengths = np.array(lengths, np.int64)
        self.starts = np.cumsum(lengths) - lengths + 1

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        return np.arange(self.starts[index], self.starts[index] + self.lengths[index], dtype=np.uint16)

    def of(self, tokens):
        """The document of each token."""
        return np.searchsorted(self.starts, tokens, side="right")


lengths = st.lists(st.integers(2, 40), min_size=1, max_size=12)
contexts = st.integers(1, 50)
seeds = st.none() | st.integers(0, 2**31 - 1)


def epoch_of(windows, epoch):
    items = [windows[epoch * windows.per_epoch + i] for i in range(windows.per_epoch)]
    return {name: np.concatenate([item[name] for item in items]) for name in items[0]}


@settings(max_examples=200, deadline=None)
@given(lengths, contexts, seeds, st.integers(0, 3))
def test_an_epoch_holds_each_document_once_and_predicts_each_token_once(lengths, context, seed, epoch):
    documents = Numbered(lengths)
    total = sum(lengths)
    windows = Windows(documents, context, seed=seed, count=None if seed is None else 10**6)
    stream = epoch_of(windows, epoch if seed is not None else 0)
    # The concatenation is the first token and then every target; what is left is padding.
    concatenation = np.concatenate([stream["tokens"][:1], stream["targets"][: total - 1]])
    order = documents.of(concatenation[np.isin(concatenation, documents.starts)]) - 1
    assert sorted(order) == list(range(len(lengths)))
    assert concatenation.tolist() == np.concatenate([documents[i] for i in order]).tolist()
    assert not stream["targets"][total - 1 :].any()
    assert len(stream["targets"]) - (total - 1) < context
    # Each token is predicted once, but the first of a document never.
    mask = stream["loss_mask"]
    assert sorted(stream["targets"][mask]) == sorted(set(range(1, total + 1)) - set(documents.starts))
    assert (stream["targets"][mask] == stream["tokens"][mask] + 1).all()


@settings(max_examples=200, deadline=None)
@given(lengths, contexts, seeds, st.data())
def test_segments_number_the_documents_of_a_window(lengths, context, seed, data):
    documents = Numbered(lengths)
    windows = Windows(documents, context, seed=seed)
    item = windows[data.draw(st.integers(0, len(windows) - 1))]
    tokens, segments = item["tokens"], item["segment_ids"]
    assert {name: (array.shape, array.dtype) for name, array in item.items()} == {
        "tokens": ((context,), np.int32),
        "targets": ((context,), np.int32),
        "segment_ids": ((context,), np.int32),
        "loss_mask": ((context,), np.bool_),
    }
    assert ((segments == 0) == (tokens == 0)).all()
    real = tokens > 0
    assert real[: real.sum()].all()  # padding comes last
    changes = np.diff(documents.of(tokens[real])) != 0
    assert segments[real].tolist() == [1, *(1 + np.cumsum(changes))]
    assert (tokens[1:] == item["targets"][:-1]).all()
    assert not item["loss_mask"][~real].any()


@settings(max_examples=200, deadline=None)
@given(lengths, contexts, seeds, st.integers(1, 200), st.randoms(use_true_random=False))
def test_a_window_depends_on_seed_and_index_alone(lengths, context, seed, count, random):
    documents = Numbered(lengths)
    windows = Windows(documents, context, seed=seed, count=count)
    longer = pickle.loads(pickle.dumps(Windows(documents, context, seed=seed, count=2 * count)))  # noqa: S301
    assert (len(windows), len(longer)) == (count, 2 * count)
    for index in random.sample(range(count), min(count, 10)):
        for name, array in windows[index].items():
            assert (array == longer[index][name]).all()


def test_epochs_and_seeds_have_orders_of_their_own_and_none_keeps_the_order():
    documents = Numbered([5] * 50)
    orders = {(seed, epoch): tuple(Windows(documents, 8, seed=seed)._order(epoch)[0])
              for seed in (0, 1, None) for epoch in (0, 1)}  # fmt: skip
    assert orders[None, 0] == orders[None, 1] == tuple(range(50))
    assert len(set(orders.values())) == 5
    # A fixed expectation: the order must not change between versions, or a resumed run would repeat text.
    assert orders[0, 1][:8] == (7, 10, 35, 41, 18, 4, 38, 11)


@pytest.mark.parametrize("index", [-1, 7])
def test_an_index_outside_is_an_error(index):
    with pytest.raises(IndexError, match=f"Window {index} is not among the 7"):
        Windows(Numbered([5]), 8, seed=0, count=7)[index]
