"""Small tokenizers of every kind that published models have, over one alphabet."""

import functools

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from zaya_jax.data.tokenizer import EOT_TEXT, Tokenizer, train_tokenizer

UNKNOWN = "<unk>"
WORDS = ["the", "model", "reads", "ab", "rows", "é", ".", "n't"]
CHARACTERS = "themodlrasbw"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
TEXT = "the model reads rows. ab é☃日本語👩‍🚀e\u0301 n't\n"  # each tokenizer lacks some of it


def _byte_level() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(train_tokenizer(["the model reads rows é☃"] * 9, 280)._backend.to_str())


def _bpe(first: list[str]) -> tokenizers.Tokenizer:
    """BPE of SentencePiece, with `▁` for spaces and a token for each byte of what the vocabulary lacks."""
    vocab = [EOT_TEXT, *BYTES, "▁", *dict.fromkeys(CHARACTERS + ".é☃")]
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "a"), ("a", "b"), ("m", "o"), ("▁", "mo")]
    vocab += ["".join(pair) for pair in merges]
    model = models.BPE({token: index for index, token in enumerate(vocab)}, merges, byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Sequence([*map(normalizers.Prepend, first), normalizers.Replace(" ", "▁")])
    return backend


def _llama() -> tokenizers.Tokenizer:
    backend = _bpe(["▁"])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


def _gemma() -> tokenizers.Tokenizer:
    backend = _bpe([])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def _unigram() -> tokenizers.Tokenizer:
    pieces = [EOT_TEXT, UNKNOWN, *BYTES, "▁", *dict.fromkeys(CHARACTERS + ".☃"), "▁the", "▁mo", "del", "▁a", "ab"]
    scores = [(piece, 0.0 if index < 2 else -float(20 - len(piece))) for index, piece in enumerate(pieces)]
    backend = tokenizers.Tokenizer(models.Unigram(scores, unk_id=1, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always")])
    return backend


def _wordpiece() -> tokenizers.Tokenizer:
    pieces = [EOT_TEXT, UNKNOWN, *WORDS, *dict.fromkeys(CHARACTERS), *(f"##{letter}" for letter in CHARACTERS), "日"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=True)
    return backend


def _word_level() -> tokenizers.Tokenizer:
    vocab = {word: index for index, word in enumerate([EOT_TEXT, UNKNOWN, *WORDS])}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return backend


KINDS = {"byte level": _byte_level, "llama": _llama, "gemma": _gemma, "unigram": _unigram, "wordpiece": _wordpiece,
         "word level": _word_level}  # fmt: skip


@functools.cache
def tokenizer(kind: str) -> Tokenizer:
    return Tokenizer(KINDS[kind]())
