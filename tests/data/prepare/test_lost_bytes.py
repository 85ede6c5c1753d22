"""The bytes of a text that its tokens do not decode to are counted, white space and control characters too."""

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from tests.tokenizer_kinds import tokenizer
from zaya_jax.data.tokenizer import EOT_TEXT, Tokenizer

SHOWN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
# The letter that stands for a byte: itself if it is shown, otherwise one above U+00FF.
LETTERS = {byte: chr(byte) for byte in SHOWN}
LETTERS |= {byte: chr(256 + place) for place, byte in enumerate(sorted(set(range(256)) - set(SHOWN)))}
TEXTS = st.text("ab \n\t\r\0\x7f\x1bé☃", max_size=30)


def byte_level(missing=(), **parts):
    """A byte-level tokenizer without tokens for some bytes."""
    vocab = [EOT_TEXT, *(letter for byte, letter in sorted(LETTERS.items()) if byte not in missing)]
    backend = tokenizers.Tokenizer(models.BPE({token: index for index, token in enumerate(vocab)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    for name, part in parts.items():
        setattr(backend, name, part)
    return backend


def lost(backend, text):
    tokens = backend if isinstance(backend, Tokenizer) else Tokenizer(backend)
    [(encoded, count)] = tokens.encode_counted([text])
    assert encoded == tokens.encode(text)
    return count


@given(TEXTS, st.sets(st.sampled_from([*b"a \n\t\r\0\x7f\x1b\xc3\x83"]), max_size=3))
def test_every_character_with_a_byte_without_token_is_lost_and_no_other(text, missing):
    gone = sum(len(sign.encode()) for sign in text if missing.intersection(sign.encode()))
    assert lost(byte_level(missing), text) == gone


@pytest.mark.parametrize(("parts", "text", "count"), [
    ({"normalizer": normalizers.Replace("\u00ad", "")}, "soft\u00adhyphen", 2),
    ({"normalizer": normalizers.Replace(Regex(r"\d+"), "")}, "year 2024 ", 4),
    ({"normalizer": normalizers.Strip()}, "  a b\n", 3),
    ({"normalizer": normalizers.NFC()}, "e\u0301 fi", 0),
    ({"normalizer": normalizers.Lowercase()}, "A b", 1),
    ({"pre_tokenizer": pre_tokenizers.Sequence([pre_tokenizers.Punctuation("removed"),
                                                pre_tokenizers.ByteLevel(add_prefix_space=False)])}, "a,b.", 2),
])  # fmt: skip
def test_what_a_tokenizer_removes_before_it_looks_for_tokens_is_lost(parts, text, count):
    assert lost(byte_level(**parts), text) == count


def test_white_space_that_an_added_token_takes_with_it_is_lost():
    backend = byte_level()
    backend.add_tokens([AddedToken("<b>", lstrip=True, rstrip=True)])
    assert lost(backend, "x \n<b>\t y") == 4


@pytest.mark.parametrize(("kind", "text", "count"), [
    ("byte level", "a  b\n\tc ", 0), ("llama", " a  b\n\tc ", 0), ("gemma", " a  b\n\tc ", 0),
    ("unigram", " a", 1), ("word level", "ab  ab\n\tthe", 2), ("word level", "the\nzebra", 6),
    ("wordpiece", "the  model", 1), ("wordpiece", "the model", 0),
])  # fmt: skip
def test_spaces_that_a_tokenizer_strips_or_joins_are_lost(kind, text, count):
    assert lost(tokenizer(kind), text) == count


@given(st.lists(TEXTS, max_size=4))
def test_many_texts_have_the_tokens_and_counts_of_each(texts):
    for tokens in (Tokenizer(byte_level(b"\n\xc3")), tokenizer("word level"), tokenizer("byte level")):
        counted = list(tokens.encode_counted(texts))
        assert counted == [(tokens.encode(text), lost(tokens, text)) for text in texts]
