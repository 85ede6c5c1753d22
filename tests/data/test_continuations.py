"""A continuation is what all tokens decode to, less what the prompt's tokens decode to."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.tokenizer_kinds import KINDS, TEXT, tokenizer

TEXTS = st.text(TEXT) | st.text("é☃日本語👩‍🚀", min_size=6)
every_kind = pytest.mark.parametrize("kind", KINDS)


def added(tokens, before, after):
    known, whole = tokens.decode(before), tokens.decode([*before, *after])
    while not whole.startswith(known):
        known = known[:-1]
    return whole[len(known) :]


@every_kind
@given(before=TEXTS, after=TEXTS)
@example("the model reads", " the")
@example("日本語" * 9, "日")
def test_of_texts(kind, before, after):
    tokens = tokenizer(kind)
    before, after = tokens.encode(before), tokens.encode(after)
    assert tokens.decode_after(before, after) == added(tokens, before, after)


@every_kind
@given(data=st.data())
def test_of_any_tokens(kind, data):
    """Also of those that are half a character, of special ones, and of numbers that no token has."""
    tokens = tokenizer(kind)
    ids = st.lists(st.integers(0, tokens.vocab_size + 1), max_size=40)
    bytes_of = st.text("é☃日本語👩", max_size=9).map(tokens.encode)
    before, after = data.draw(ids | bytes_of), data.draw(ids | bytes_of)
    cut = data.draw(st.integers(0, len(after)))
    before, after = [*before, *after[:cut]], after[cut:]
    assert tokens.decode_after(before, after) == added(tokens, before, after)
