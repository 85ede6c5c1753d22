"""Train a byte-level BPE tokenizer or load a `tokenizer.json`, and convert text to token ids and back."""

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
EOT_TEXTS = (EOT_TEXT, "<|end_of_text|>", "<eos>", "</s>")  # common tokens that end a document
MIN_VOCAB = 257  # every byte and the end-of-text token

_PADDED_TO = 128  # vocabularies are padded to a multiple of this, since matrix units work on whole tiles
_BATCH_TEXTS = 256  # enough for all cores, few enough for memory


class Tokenizer:
    """Converts text to token ids and back.

    `encode` treats the name of a special token inside a text as ordinary text. With a tokenizer from `train_tokenizer`,
    `decode(encode(text)) == text` for every text.

    Attributes:
      eot: id of the token that ends a document.
      eot_text: text of that token.
      prefix: ids of the tokens that begin a document: one or none.
    """

    def __init__(self, backend: tokenizers.Tokenizer, eot_text: str = EOT_TEXT, bos_text: str | None = None) -> None:
        """Wrap a tokenizer of the `tokenizers` library (see `train_tokenizer`, `load_tokenizer`)."""
        self._backend = backend
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = True
        self.eot = self._known(eot_text)
        self.eot_text = eot_text
        self.prefix = [] if bos_text is None else [self._known(bos_text)]

    def _known(self, text: str) -> int:
        token = self._backend.token_to_id(text)
        if token is None:
            raise InputError(f"The tokenizer has no token {text!r}.")
        return token

    def token_id(self, text: str) -> int | None:
        """Return the id of the token `text`; None if it is not in the vocabulary."""
        return self._backend.token_to_id(text)

    @functools.cached_property
    def vocab_size(self) -> int:
        """The largest token id plus 1. After training on a small corpus, it can be below the requested size."""
        return max(self._backend.get_vocab(with_added_tokens=True).values()) + 1

    @functools.cached_property
    def specials(self) -> frozenset[str]:
        """The texts of the special tokens."""
        return frozenset(token.content for token in self._backend.get_added_tokens_decoder().values() if token.special)

    def encode(self, text: str) -> list[int]:
        """Encode a text without adding special tokens.

        Raises:
          InputError: the text contains an unpaired surrogate, which UTF-8 cannot represent.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"The text cannot be encoded: its character at position {error.start} is an unpaired surrogate."
            ) from error
        return self._backend.encode(text, add_special_tokens=False).ids

    def encode_all(self, texts: Iterable[str]) -> Iterator[list[int]]:
        """Encode texts in order, on all cores; see `encode`."""
        texts = iter(texts)
        while batch := list(islice(texts, _BATCH_TEXTS)):
            encodings = self._backend.encode_batch_fast(batch, add_special_tokens=False)
            yield from (encoding.ids for encoding in encodings)

    def encode_template(self, text: str) -> list[int]:
        """Encode the output of a chat template, in which the names of special tokens become those tokens."""
        return self.encode_rendering(text)[0]

    def encode_rendering(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Encode like `encode_template`; also return the character range [start, stop) of each token."""
        encoding = self._template.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def decode(self, tokens: Sequence[int], *, special: bool = True) -> str:
        """Decode token ids. Bytes that are not UTF-8 become U+FFFD.

        Args:
          tokens: the ids.
          special: whether special tokens become their names; they are left out otherwise.
        """
        return self._backend.decode(list(tokens), skip_special_tokens=not special)

    def save(self, path: Path) -> None:
        """Write the tokenizer as JSON in the format of the `tokenizers` library."""
        path.write_text(self._backend.to_str(pretty=False), encoding="utf-8")

    @functools.cached_property
    def _template(self) -> tokenizers.Tokenizer:
        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())  # the copy has `encode_special_tokens` off
        backend.post_processor = None  # it adds no special tokens here, but would trim spaces from the offsets
        return backend


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer.

    The result does not depend on the number of threads: the initial alphabet is fixed, and the library breaks ties
    between pairs by their ids.

    Args:
      texts: texts of the train split.
      vocab_size: number of token ids, including the end-of-text token (id 0); fewer are used if the texts have too
        few pairs to merge.

    Raises:
      InputError: `vocab_size` is below `MIN_VOCAB`.
    """
    allowed = f"at least {MIN_VOCAB}: one token per byte, plus {EOT_TEXT}"
    require(vocab_size >= MIN_VOCAB, "model.vocab_size", vocab_size, allowed)
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOT_TEXT],  # special tokens come first, so its id is 0
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return Tokenizer(backend, bos_text=EOT_TEXT)


def load_tokenizer(path: Path, eot_text: str | None = None, bos_text: str | None = None, *,
                   default_eot: str | None = None) -> Tokenizer:  # fmt: skip
    """Load a `tokenizer.json`.

    Args:
      path: path of the file.
      eot_text: the token that ends a document; None selects the one of `EOT_TEXTS` in the vocabulary.
      bos_text: the token that begins a document; None means none.
      default_eot: the token that ends a document if `eot_text` is None and the vocabulary has none or several of
        `EOT_TEXTS`.

    Raises:
      InputError: the file is missing or not a tokenizer, or a token is unknown or ambiguous.
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
        raise InputError(f"The tokenizer file {path} {has}; name the token that ends a document as eos_token "
                         "of a tokenizer_config.json beside it, or with --eot of data prepare.")  # fmt: skip
    return Tokenizer(backend, eot_text, bos_text)


def tokenizer_path(named: str) -> Path:
    """Return the `tokenizer.json` that --tokenizer names: the file itself, or the folder that has it.

    Raises:
      InputError: there is no such file.
    """
    path = Path(named).expanduser()
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise InputError(f"--tokenizer is {named!r}, but must be a tokenizer.json or a folder that has one.")
    return path


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int, path: Path) -> None:
    """Raise `InputError` if the tokenizer at `path` has more tokens than the model's `vocab_size`."""
    if tokenizer.vocab_size > vocab_size:
        raise InputError(
            f"The tokenizer file {path} has {tokenizer.vocab_size} tokens, more than model.vocab_size ({vocab_size}); "
            f"raise model.vocab_size to at least {tokenizer.vocab_size}."
        )


def vocabulary_warning(tokenizer: Tokenizer, vocab_size: int) -> str | None:
    """Return a warning about unused embedding rows; None if they only pad to a multiple of `_PADDED_TO`."""
    if -(-tokenizer.vocab_size // _PADDED_TO) * _PADDED_TO >= vocab_size:
        return None
    return (f"Warning: the tokenizer has {tokenizer.vocab_size:,} tokens, but model.vocab_size is {vocab_size:,}; "
            f"{vocab_size - tokenizer.vocab_size:,} rows of the embedding are never used. Lower model.vocab_size, or "
            "use a larger tokenizer.")  # fmt: skip
