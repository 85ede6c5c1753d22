"""Byte-level BPE trained on a corpus, or any `tokenizer.json`: text to token ids and back."""

import functools
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from zaya_jax.config.checks import require
from zaya_jax.errors import InputError
from zaya_jax.run.files import require_regular

EOT_TEXT = "<|endoftext|>"
EOT_TEXTS = (EOT_TEXT, "<|end_of_text|>", "<eos>", "</s>")  # what ends a document, in the tokenizers people use
MIN_VOCAB = 257  # every byte, and the end of a text

_PADDED_TO = 128  # vocabularies are padded to a multiple of this, since matrix units work on whole tiles
_BATCH_TEXTS = 256  # texts; bounds memory and still feeds every core


class Tokenizer:
    """Text to token ids and back.

    The text of a special token inside a text is text like any other. With a tokenizer of `train_tokenizer`,
    `decode(encode(text)) == text` for every text.

    Attributes:
      eot: the token between documents.
      eot_text: its text.
      prefix: the tokens that begin a document: one, or none.
    """

    def __init__(self, backend: tokenizers.Tokenizer, eot_text: str = EOT_TEXT, bos_text: str | None = None) -> None:
        """Wrap a tokenizer of the `tokenizers` library (see `train_tokenizer`, `load_tokenizer`)."""
        self._backend = backend
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = True
        self.eot = self._backend.token_to_id(eot_text)
        self.eot_text = eot_text
        self.prefix = [] if bos_text is None else [self._backend.token_to_id(bos_text)]

    def token_id(self, text: str) -> int | None:
        """The id of the token `text`; None where the vocabulary lacks it."""
        return self._backend.token_to_id(text)

    @functools.cached_property
    def vocab_size(self) -> int:
        """One more than the largest token id; a small corpus may not fill the vocabulary it was asked for."""
        return max(self._backend.get_vocab(with_added_tokens=True).values()) + 1

    @functools.cached_property
    def specials(self) -> frozenset[str]:
        """The texts of the special tokens."""
        return frozenset(token.content for token in self._backend.get_added_tokens_decoder().values() if token.special)

    def encode(self, text: str) -> list[int]:
        """The text's token ids, without any added before or after it.

        Raises:
          InputError: the text holds half of a surrogate pair, which no UTF-8 text can.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"The text cannot be encoded: its character at position {error.start} is an unpaired surrogate."
            ) from error
        return self._backend.encode(text, add_special_tokens=False).ids

    def encode_all(self, texts: Iterable[str]) -> Iterator[list[int]]:
        """`encode` of each text in order, on all cores."""
        texts = iter(texts)
        while batch := list(islice(texts, _BATCH_TEXTS)):
            encodings = self._backend.encode_batch_fast(batch, add_special_tokens=False)
            yield from (encoding.ids for encoding in encodings)

    def encode_template(self, text: str) -> list[int]:
        """The token ids of a text in which special tokens are meant: what a chat template writes."""
        return self.encode_rendering(text)[0]

    def encode_rendering(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """As `encode_template`, and for each token the first character it stands for and the one after the last."""
        encoding = self._template.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of the token ids. Special tokens become their texts; bytes that are not UTF-8 become U+FFFD."""
        return self._backend.decode(list(tokens), skip_special_tokens=False)

    def save(self, path: Path) -> None:
        """Write the tokenizer as JSON in the format of the `tokenizers` library."""
        path.write_text(self._backend.to_str(pretty=False), encoding="utf-8")

    @functools.cached_property
    def _template(self) -> tokenizers.Tokenizer:
        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())  # which does not hold `encode_special_tokens`
        backend.post_processor = None  # without special tokens to add, it would only trim spaces off the offsets
        return backend


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train on the texts.

    The same texts give the same file whatever the number of threads: the initial alphabet is fixed, and the
    library orders pairs of equal count by their ids.

    Args:
      texts: the train split.
      vocab_size: number of token ids, the end of a text (0) included; fewer are used where the texts have too
        few pairs.

    Raises:
      InputError: the vocabulary has no room for every byte and the end of a text.
    """
    allowed = f"at least {MIN_VOCAB}: one token a byte and {EOT_TEXT}"
    require(vocab_size >= MIN_VOCAB, "model.vocab_size", vocab_size, allowed)
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOT_TEXT],  # specials come first, which makes it 0
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return Tokenizer(backend, bos_text=EOT_TEXT)


def load_tokenizer(path: Path, eot_text: str | None = None, bos_text: str | None = None, *,
                   default_eot: str | None = None) -> Tokenizer:  # fmt: skip
    """Read a `tokenizer.json`.

    Args:
      path: its file.
      eot_text: the token that ends a document; where None, the one of `EOT_TEXTS` that the tokenizer has.
      bos_text: the token that begins a document; None where nothing does.
      default_eot: taken where the tokenizer has none or several of `EOT_TEXTS`.

    Raises:
      InputError: the file is missing or is no such tokenizer, or the end of a document is unknown.
    """
    try:
        require_regular(path)
        backend = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except InputError:
        raise
    except Exception as error:  # the library raises bare Exception
        raise InputError(f"The tokenizer file {path} cannot be read: {error}.") from error
    known = [text for text in EOT_TEXTS if backend.token_to_id(text) is not None]
    if eot_text is None:
        eot_text = known[0] if len(known) == 1 else default_eot
    if eot_text is not None:
        for text, role in ((eot_text, "end"), (bos_text, "begin")):
            if text is not None and backend.token_to_id(text) is None:
                raise InputError(f"The tokenizer file {path} has no token {text!r} to {role} a document.")
    else:
        has = f"has {' and '.join(known)}" if known else f"has none of {', '.join(EOT_TEXTS)}"
        raise InputError(f"The tokenizer file {path} {has}; choose the token that ends a document with --eot.")
    return Tokenizer(backend, eot_text, bos_text)


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int, path: Path) -> None:
    """Raise `InputError` where the tokenizer at `path` has more tokens than the model's `vocab_size`."""
    if tokenizer.vocab_size > vocab_size:
        raise InputError(
            f"The tokenizer file {path} has {tokenizer.vocab_size} tokens, more than model.vocab_size ({vocab_size}); "
            f"raise model.vocab_size to at least {tokenizer.vocab_size}."
        )


def vocabulary_warning(tokenizer: Tokenizer, vocab_size: int) -> str | None:
    """A sentence on the embedding rows that no token uses; None where they only pad to a multiple of `_PADDED_TO`."""
    if -(-tokenizer.vocab_size // _PADDED_TO) * _PADDED_TO >= vocab_size:
        return None
    return (f"Warning: the tokenizer has {tokenizer.vocab_size:,} tokens, but model.vocab_size is {vocab_size:,}; "
            f"{vocab_size - tokenizer.vocab_size:,} rows of the embedding are never used. Lower model.vocab_size, or "
            "use a larger tokenizer.")  # fmt: skip
