import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from zaya_jax.data.loading.document_parts import Items, fit, whole_documents

lengths = st.lists(st.integers(1, 60), max_size=12).map(lambda sizes: np.array(sizes, np.int64))
contexts = st.integers(1, 30)


def predicted(items):
    """The tokens that items predict, as (document, place), each item's first token being given."""
    return [(document, place) for document, start, length in zip(*items, strict=True)
            for place in range(start + 1, start + length)]  # fmt: skip


def test_whole_documents_are_in_order():
    items = whole_documents(np.array([3, 0, 5]))
    assert items.document.tolist() == [0, 1, 2]
    assert items.start.tolist() == [0, 0, 0]
    assert items.length.tolist() == [3, 0, 5]
    assert items.length.sum() == 8


@given(lengths, contexts)
def test_split_predicts_each_token_once_and_every_piece_fits(lengths, context):
    whole = whole_documents(lengths)
    fitted = fit(whole, context, "split", whole=True)
    assert predicted(fitted.used) == predicted(whole)
    assert ((fitted.used.length >= 2) & (fitted.used.length <= context + 1)).all()
    assert fitted.counts["split"] == (lengths > context + 1).sum()
    assert fitted.counts["short"] == (lengths == 1).sum()
    assert len(fitted.dropped.document) == 0


@given(lengths, contexts)
def test_drop_leaves_out_what_is_too_long_and_nothing_else(lengths, context):
    for whole in (True, False):
        fitted = fit(whole_documents(lengths), context, "drop", whole=whole)
        used = (lengths <= context + 1) & ((lengths > 1) | (not whole))
        assert fitted.used.document.tolist() == np.flatnonzero(used).tolist()
        assert fitted.used.length.tolist() == lengths[used].tolist()
        assert fitted.dropped.document.tolist() == np.flatnonzero(lengths > context + 1).tolist()
        assert fitted.counts["dropped"] == len(fitted.dropped.document)


@given(lengths, contexts)
def test_trim_keeps_the_beginning(lengths, context):
    fitted = fit(whole_documents(lengths), context, "trim", whole=True)
    used = lengths > 1
    assert fitted.used.document.tolist() == np.flatnonzero(used).tolist()
    assert fitted.used.length.tolist() == np.minimum(lengths[used], context + 1).tolist()
    assert not fitted.used.start.any()
    assert fitted.counts["trimmed"] == (lengths > context + 1).sum()


def test_windows_split_by_themselves():
    whole = whole_documents(np.array([1, 100]))
    assert fit(whole, 8, "split", whole=False).used is whole


@given(lengths, contexts, st.randoms(use_true_random=False))
def test_what_was_trimmed_can_be_made_whole_again(lengths, context, random):
    whole = whole_documents(lengths)
    trimmed = fit(whole, context, "trim", whole=True).used
    order = list(range(len(trimmed.document)))
    random.shuffle(order)
    rest = trimmed.take(np.array(order, np.int64))
    assert rest.untrimmed(whole, context + 1).length.tolist() == lengths[rest.document].tolist()


def test_what_was_begun_stays_as_it_is():
    originals = Items(np.array([0, 0, 1, 2]), np.array([0, 10, 0, 0]), np.array([10, 20, 7, 9]))
    rest = Items(np.array([1, 0, 0, 2]), np.array([3, 0, 10, 0]), np.array([2, 4, 4, 3]))
    assert rest.untrimmed(originals, 4).length.tolist() == [2, 10, 20, 3]  # the last one's end is read already
