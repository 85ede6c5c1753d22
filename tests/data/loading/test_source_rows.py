from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data_helpers import Numbered
from zaya_jax.data.loading.bin_packing import pack
from zaya_jax.data.loading.document_parts import Items, whole_documents
from zaya_jax.data.loading.source_rows import Packer, Position, cached_bins
from zaya_jax.errors import InputError


def predictions(documents, items):
    """The tokens that items predict."""
    return Counter(
        int(documents.starts[document]) + place
        for document, start, length in zip(*items, strict=True)
        for place in range(start + 1, start + length)
    )


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
    return tmp_path_factory.mktemp("plans")


stages = st.tuples(st.sampled_from(["windows", "bins"]), st.integers(1, 25), st.integers(0, 40))


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12), phases=st.lists(stages, min_size=1, max_size=4),
       seed=st.integers(0, 99))  # fmt: skip
def test_no_token_is_lost_or_repeated_within_an_epoch_whatever_the_phases(plans, lengths, phases, seed):
    documents, position, seen = Numbered([*lengths, 2]), Position(), Counter()
    for packing, context, rows in phases:
        stage = Packer(packing, "split", context, seed, plans).phase_rows(documents, "same", position, "a source")
        for index in range(rows):
            row = stage.row(index)
            assert (row["targets"][row["loss_mask"]] == row["tokens"][row["loss_mask"]] + 1).all()
            seen.update(row["targets"][row["loss_mask"]].tolist())
        position = stage.after(rows, position)
    everything = predictions(documents, whole_documents(documents.lengths))
    left = Counter() if position.rest is None else predictions(documents, position.rest)
    assert set(left.values()) <= {1}
    epochs = position.epoch + (position.rest is not None)
    assert seen == Counter({token: epochs - left[token] for token in everything if epochs - left[token]})


@settings(max_examples=30, deadline=None)
@given(lengths=st.lists(st.integers(2, 40), min_size=1, max_size=12), seed=st.integers(0, 9),
       rows=st.integers(0, 30), more=st.integers(0, 10))  # fmt: skip
def test_a_phase_that_changes_nothing_changes_nothing(plans, lengths, seed, rows, more):
    """Windows of one context: cutting the phase in two gives the same rows while the epoch lasts."""
    documents, packer = Numbered(lengths), Packer("windows", "split", 8, seed, plans)
    whole = packer.phase_rows(documents, "same", Position(), "a source")
    rows = min(rows, whole.later.rows.per_epoch)
    second = packer.phase_rows(documents, "same", whole.after(rows, Position()), "a source")
    for index in range(min(more, whole.later.rows.per_epoch - rows)):
        for name, array in whole.row(rows + index).items():
            if name != "positions":  # an item that is begun anew counts from its own start
                assert (array == second.row(index)[name]).all(), name


def test_documents_too_long_for_one_phase_are_left_to_the_next(plans):
    documents = Numbered([5, 30, 6, 31])
    first = Packer("bins", "drop", 10, 0, plans).phase_rows(documents, "same", Position(), "a source")
    assert first.later.counts["dropped"] == 2
    position = first.after(first.first.rows.per_epoch, Position())
    assert position.epoch == 0
    assert sorted(position.rest.document) == [1, 3]
    assert position.epochs_read == pytest.approx(9 / 68)
    second = Packer("bins", "drop", 40, 0, plans).phase_rows(documents, "same", position, "a source")
    seen = {int(token) for index in range(second.first.rows.per_epoch) for token in second.row(index)["tokens"]} - {0}
    assert seen == {*range(6, 35), *range(42, 72)}
    assert second.after(second.first.rows.per_epoch, position) == Position(1)


def test_trimmed_documents_that_were_not_read_are_whole_again(plans):
    documents = Numbered([30] * 6)
    first = Packer("bins", "trim", 10, 0, plans).phase_rows(documents, "same", Position(), "a source")
    assert first.later.counts["trimmed"] == 6
    position = first.after(2, Position())
    assert position.rest.length.tolist() == [30] * 4
    assert position.epochs_read == pytest.approx(2 / 6)


def test_conversations_written_out_anew_go_on_by_number(plans):
    short, long = Numbered([5, 0, 6, 4, 3]), Numbered([9, 20, 8, 7, 6])  # document 1 did not fit
    first = Packer("bins", "trim", 5, 3, plans).phase_rows(short, "short", Position(), "a source")
    position = first.after(2, Position())
    assert 1 in position.rest.document
    second = Packer("bins", "trim", 25, 3, plans).phase_rows(long, "long", position, "a source")
    read = {int(np.searchsorted(long.starts, token, side="right")) - 1 for index in range(second.first.rows.per_epoch)
            for token in second.row(index)["tokens"] if token}  # fmt: skip
    assert read == set(position.rest.document.tolist())


def test_a_conversation_that_was_begun_is_over_when_it_is_written_out_anew(plans):
    documents = Numbered([10, 10])
    rest = Items(np.array([0, 1]), np.array([4, 0]), np.array([6, 10]))
    position = Position(0, rest, "old", documents.lengths)
    stage = Packer("windows", "split", 5, 0, plans).phase_rows(documents, "new", position, "a source")
    assert {int(token) for token in stage.first.rows.row(0, 0)["tokens"]} == {*range(11, 16)}


def test_pieces_of_which_some_were_read_are_over_too(plans):
    """With bins any piece may have been read first."""
    documents = Numbered([31] * 8)
    for seed in range(5):
        packer = Packer("bins", "split", 10, seed, plans)
        stage = packer.phase_rows(documents, "old", Position(), "a source")
        position = stage.after(9, Position())
        read = {int(np.searchsorted(documents.starts, token, side="right")) - 1
                for index in range(9) for token in stage.row(index)["tokens"] if token}  # fmt: skip
        assert sorted(position.unread_documents(documents.lengths).document) == sorted(set(range(8)) - read)


@pytest.mark.parametrize(("packing", "context"), [("bins", 1), ("bins", 8), ("windows", 1), ("windows", 8)])
def test_epochs_are_counted_in_predictions(plans, packing, context):
    documents = Numbered([31] * 8)
    stage = Packer(packing, "split", context, 0, plans).phase_rows(documents, "same", Position(), "a source")
    for rows in (1, 5, stage.first.rows.per_epoch - 1):
        made = sum(int(stage.row(index)["loss_mask"].sum()) for index in range(rows))
        assert stage.after(rows, Position()).epochs_read == pytest.approx(made / 240)


def test_nothing_to_read_is_refused(plans):
    with pytest.raises(InputError, match=r"data\.sources\.x yields no row of 4 tokens: all its documents"):
        Packer("bins", "drop", 4, 0, plans).phase_rows(Numbered([9, 8]), "same", Position(), "data.sources.x")


def test_no_rows_move_nothing(plans):
    stage = Packer("windows", "split", 4, 0, plans).phase_rows(Numbered([9]), "same", Position(), "a source")
    assert stage.after(0, Position(3)) == Position(3)


def test_bins_are_planned_once(tmp_path, monkeypatch):
    sizes = np.array([3, 5, 2, 8, 1])
    first = cached_bins(sizes, 8, tmp_path)
    assert [first[i].tolist() for i in range(len(first))] == [pack(sizes, 8)[i].tolist() for i in range(len(first))]
    monkeypatch.setattr("zaya_jax.data.loading.source_rows.pack", None)
    second = cached_bins(sizes.astype(np.int32), 8, tmp_path)
    assert (first.members == second.members).all()
    assert (first.starts == second.starts).all()
    with pytest.raises(TypeError):
        cached_bins(sizes, 9, tmp_path)


@pytest.mark.parametrize("how", ["cut", "empty", "members", "starts"])
def test_a_damaged_plan_is_made_anew(tmp_path, how):
    sizes = np.array([3, 5, 2, 8, 1])
    right = cached_bins(sizes, 8, tmp_path)
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    if how in ("cut", "empty"):
        path.write_bytes(content[:-40] if how == "cut" else b"")
    else:
        before, array, after = content.partition(getattr(right, how).tobytes())
        path.write_bytes(before + bytes([array[0] ^ 1]) + array[1:] + after)
    again = cached_bins(sizes, 8, tmp_path)
    assert (again.members == right.members).all()
    assert (again.starts == right.starts).all()
