import itertools
import pickle

import chex
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.data_helpers import Numbered
from zaya_jax.data.loading.bin_packing import pack
from zaya_jax.data.loading.document_parts import Items, fit, whole_documents
from zaya_jax.data.loading.packed_rows import BinRows, Windows, permutation


def tokens_of(documents, items):
    """The tokens of each item."""
    return [documents[d].tokens[start : start + length].tolist() for d, start, length in zip(*items, strict=True)]


@st.composite
def numbered(draw, most=40):
    """A few documents, with counts or without."""
    lengths = draw(st.lists(st.integers(1, most), min_size=1, max_size=12))
    if draw(st.booleans()):
        return Numbered(lengths)
    rng = np.random.default_rng(draw(st.integers(0, 2**31 - 1)))
    return Numbered(lengths, rng.random(1 + sum(lengths)) < rng.random())


@st.composite
def items_of(draw, documents, least=1):
    """All documents in order, or some parts of some of them, each at least `least` long, in any order."""
    if draw(st.booleans()):
        items = whole_documents(documents.lengths)
    else:
        rng = np.random.default_rng(draw(st.integers(0, 2**31 - 1)))
        cuts = [np.unique([0, length, *rng.integers(0, length + 1, 3)]) for length in documents.lengths]
        parts = [(d, a, b - a) for d, c in enumerate(cuts) for a, b in itertools.pairwise(c)]
        chosen = rng.permutation(len(parts))[: rng.integers(1, len(parts), endpoint=True)]
        items = Items(*np.array([parts[i] for i in chosen], np.int64).T)
    return items.take(items.length >= least)


def binned(documents, items, context, seed=None):
    """Rows of whole items; what is too long is split."""
    fitted = fit(items, context, "split", whole=True).used
    return BinRows(documents, fitted, pack(fitted.length - 1, context), context, seed=seed)


def windowed(documents, items, context, seed=None):
    return Windows(documents, items, context, seed=seed)


def rows_of(packing, epoch, start=0, stop=None):
    stop = packing.per_epoch if stop is None else stop
    return [packing.row(epoch, index) for index in range(start, stop)]


def joined(rows):
    return {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}


def predicted(rows):
    """The tokens whose loss counts, each checked to follow the token it is predicted from."""
    targets = []
    for row in rows:
        mask = row["loss_mask"]
        assert (row["targets"][mask] == row["tokens"][mask] + 1).all()
        targets += row["targets"][mask].tolist()
    return targets


contexts = st.integers(1, 50)
seeds = st.none() | st.integers(0, 2**31 - 1)
kinds = pytest.mark.parametrize("packed", [windowed, binned])


# --- windows ---------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(numbered(), contexts, seeds, st.integers(0, 3), st.sampled_from([1, 3, 64]), st.data())
def test_an_epoch_holds_each_item_once_and_predicts_each_token_once(documents, context, seed, epoch, lanes, data):
    items = data.draw(items_of(documents))
    parts = {part[0]: part for part in tokens_of(documents, items)}
    total = items.length.sum()
    assume(total > 1)
    windows = Windows(documents, items, context, seed=seed, lanes=lanes)
    rows = rows_of(windows, epoch)
    stream = joined([rows[index] for index in np.argsort([windows._window(index) for index in range(len(rows))])])
    # The concatenation is the first token and then every target; what is left is padding.
    concatenation = np.concatenate([stream["tokens"][:1], stream["targets"][: total - 1]]).tolist()
    order = [token for token in concatenation if token in parts]
    assert sorted(order) == sorted(parts)
    assert concatenation == [token for first in order for token in parts[first]]
    assert seed is not None or order == list(parts)
    assert not stream["targets"][total - 1 :].any()
    assert len(stream["targets"]) - (total - 1) < context
    # Each token is predicted once, but the first of an item never.
    rest = [token for part in parts.values() for token in part[1:]]
    assert sorted(predicted(rows)) == sorted(documents.counted(rest))


@settings(max_examples=40, deadline=None)
@given(numbered(), contexts, seeds, st.integers(0, 3), st.data())
def test_segments_number_the_items_of_a_window_and_positions_their_tokens(documents, context, seed, epoch, data):
    items = data.draw(items_of(documents))
    assume(items.length.sum() > 1)
    firsts = {part[0] for part in tokens_of(documents, items)}
    windows = Windows(documents, items, context, seed=seed)
    row = windows.row(epoch, data.draw(st.integers(0, windows.per_epoch - 1)))
    tokens, segments = row["tokens"], row["segment_ids"]
    assert ((segments == 0) == (tokens == 0)).all()
    real = tokens > 0
    assert real[: real.sum()].all()  # padding comes last
    begins = np.array([place == 0 or token in firsts for place, token in enumerate(tokens[real])])
    assert segments[real].tolist() == np.cumsum(begins).tolist()
    assert (row["positions"][real] == np.arange(real.sum()) - np.flatnonzero(begins)[segments[real] - 1]).all()
    assert not row["positions"][~real].any()
    assert (tokens[1:] == row["targets"][:-1]).all()
    follows = [target > 0 and target not in firsts for target in row["targets"]]
    expected = [f and bool(documents.counted([t])) for f, t in zip(follows, row["targets"], strict=True)]
    assert row["loss_mask"].tolist() == expected


@kinds
def test_epochs_and_seeds_have_orders_of_their_own_and_none_keeps_the_order(packed):
    documents = Numbered([9] * 50)
    items = whole_documents(documents.lengths)
    orders = {(seed, epoch): tuple(row["tokens"][0] for row in rows_of(packed(documents, items, 8, seed), epoch))
              for seed in (0, 1) for epoch in (0, 1)}  # fmt: skip
    assert len(set(orders.values())) == 4
    for epoch in (0, 1):
        rows = Windows(documents, items, 8, seed=None, lanes=1) if packed is windowed else packed(documents, items, 8)
        starts = [row["tokens"][0] for row in rows_of(rows, epoch)]
        assert starts == sorted(starts)


def test_the_order_of_an_epoch_is_fixed():
    # It must not change between versions, or a resumed run would repeat text.
    assert permutation(50, 0, 1)[:8].tolist() == [7, 10, 35, 41, 18, 4, 38, 11]


# --- bins ------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(numbered(), st.integers(1, 60), seeds, st.integers(0, 3), st.data())
def test_each_item_is_whole_in_one_row_once_an_epoch(documents, context, seed, epoch, data):
    items = data.draw(items_of(documents, least=2))
    items = items.take(items.length <= context + 1)
    rows = BinRows(documents, items, pack(items.length - 1, context), context, seed=seed)
    parts = []
    for row in rows_of(rows, epoch):
        segments = row["segment_ids"]
        filled = int((segments > 0).sum())
        assert filled > 0
        assert segments[:filled].tolist() == sorted(segments[:filled])
        for name, array in row.items():
            assert not array[filled:].any(), name
        for number in range(1, segments.max() + 1):
            here = segments == number
            part = [*row["tokens"][here].tolist(), int(row["targets"][here][-1])]
            assert row["targets"][here].tolist() == part[1:]
            assert row["positions"][here].tolist() == list(range(here.sum()))
            assert row["targets"][here & row["loss_mask"]].tolist() == documents.counted(part[1:])
            parts.append(part)
    assert sorted(parts) == sorted(tokens_of(documents, items))


# --- both ------------------------------------------------------------------------------------------------------


@kinds
@settings(max_examples=20, deadline=None)
@given(numbered(), contexts, seeds, st.randoms(use_true_random=False), st.data())
def test_a_row_depends_on_seed_epoch_and_index_alone(packed, documents, context, seed, random, data):
    items = data.draw(items_of(documents))
    rows = packed(documents, items, context, seed)
    other = pickle.loads(pickle.dumps(rows))  # noqa: S301
    assert other.per_epoch == rows.per_epoch
    places = [(epoch, index) for epoch in range(4) for index in range(rows.per_epoch)]
    expected = {place: rows.row(*place) for place in places}
    for row in expected.values():
        chex.assert_shape([*row.values()], (context,))
        chex.assert_type([row[name] for name in ("tokens", "targets", "segment_ids", "positions")], np.int32)
        chex.assert_type(row["loss_mask"], bool)
    for place in random.sample(places, min(len(places), 20)):  # more epochs than orders are kept
        chex.assert_trees_all_equal(other.row(*place), expected[place])


@pytest.mark.parametrize("again", [windowed, binned])
@kinds
@settings(max_examples=40, deadline=None)
@given(numbered(), contexts, contexts, seeds, st.integers(0, 3), st.data())
def test_rows_and_what_they_leave_predict_every_token_once(packed, again, documents, context, later, seed, epoch, data):
    items = data.draw(items_of(documents))
    before = packed(documents, items, context, seed)
    done = data.draw(st.integers(0, before.per_epoch))
    rest = before.after(epoch, done)
    rows = rows_of(before, epoch, 0, done) + rows_of(again(documents, rest, later), epoch)
    firsts = [token for part in tokens_of(documents, items) for token in part[1:]]
    assert sorted(predicted(rows)) == sorted(documents.counted(firsts))


@settings(max_examples=40, deadline=None)
@given(numbered(), contexts, seeds, st.integers(0, 3), st.data())
def test_windows_over_what_windows_leave_are_the_rest_of_the_epoch(documents, context, seed, epoch, data):
    items = data.draw(items_of(documents))
    before = Windows(documents, items, context, seed=seed, lanes=1)
    done = data.draw(st.integers(0, before.per_epoch))
    rest = Windows(documents, before.after(epoch, done), context, seed=None, lanes=1)
    expected = rows_of(before, epoch, done)
    chex.assert_trees_all_equal(rows_of(rest, epoch), expected)


@given(st.integers(1, 400), st.integers(1, 80))
def test_rows_take_the_lanes_in_turn(tokens, lanes):
    documents = Numbered([tokens + 1])
    windows = Windows(documents, whole_documents(documents.lengths), 1, seed=None, lanes=lanes)
    order = [windows._window(index) for index in range(windows.per_epoch)]
    assert sorted(order) == list(range(tokens))
    used = min(lanes, tokens)
    for start in range(tokens - used + 1):  # neighbours in time lie as far apart as lanes are long
        near = np.diff(sorted(order[start : start + used]))
        assert (near >= tokens // used - 1).all()
    assert order[::used] == list(range(len(order[::used])))  # and a lane goes on where it was


@kinds
@given(numbered(), contexts, seeds, st.data())
def test_what_is_left_is_taken_from_no_array_of_the_packing(packed, documents, context, seed, data):
    rows = packed(documents, whole_documents(documents.lengths), context, seed)
    expected = rows_of(rows, 1)
    for done in range(rows.per_epoch + 1):
        for array in rows.after(1, done):
            array[:] = 0
    chex.assert_trees_all_equal(rows_of(rows, 1), expected)


@kinds
@pytest.mark.parametrize("lengths", [[], [1]])
def test_items_without_a_token_to_predict_have_no_row(packed, lengths):
    rows = packed(Numbered(lengths), whole_documents(np.array(lengths, np.int64)), 8)
    assert rows.per_epoch == 0


@given(st.integers(0, 300), st.integers(0, 2**31 - 1), st.integers(0, 10**6))
def test_a_permutation_is_one_and_a_pure_function(count, seed, epoch):
    order = permutation(count, seed, epoch)
    assert order.dtype == np.int64
    assert sorted(order) == list(range(count))
    assert np.array_equal(order, permutation(count, seed, epoch))
    assert count < 50 or not np.array_equal(order, permutation(count, seed, epoch + 1))
    assert np.array_equal(permutation(count, None, epoch), np.arange(count))
