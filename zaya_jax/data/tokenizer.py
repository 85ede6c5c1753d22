"""A byte-level BPE tokenizer: trained on the corpus, exact in both directions for every text."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from zaya_jax.errors import InputError

EOT = 0  # the token between documents
EOT_TEXT = "<|endoftext|>"
MIN_VOCAB = 257  # every byte, and EOT

_ENCODED_AT_ONCE = 256  # texts; bounds memory and still feeds every core


class Tokenizer:
    """Text to token ids and back: `decode(encode(text)) == text` for every text.

    `EOT_TEXT` inside a text is text like any other, so no document can forge the end of one.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        """Wrap a tokenizer of the `tokenizers` library (see `train_tokenizer`, `load_tokenizer`)."""
        self._backend = backend
        self._backend.encode_special_tokens = True

    @property
    def vocab_size(self) -> int:
        """Number of token ids, EOT included; a small corpus may not fill the vocabulary it was asked for."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """The text's token ids, without any EOT.

        Raises:
          InputError: the text holds half of a surrogate pair, which no UTF-8 text can.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"The text cannot be encoded: its character at position {error.start} is half of a surrogate pair."
            ) from error
        return self._backend.encode(text).ids

    def encode_all(self, texts: Iterable[str]) -> Iterator[list[int]]:
        """`encode` of each text in order, on all cores."""
        texts = iter(texts)
        while batch := list(islice(texts, _ENCODED_AT_ONCE)):
            yield from (encoding.ids for encoding in self._backend.encode_batch_fast(batch))

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of the token ids. EOT becomes `EOT_TEXT`; bytes that are not UTF-8 become U+FFFD."""
        return self._backend.decode(list(tokens), skip_special_tokens=False)

    def save(self, path: Path) -> None:
        """Write the tokenizer as JSON in the format of the `tokenizers` library."""
        path.write_text(self._backend.to_str(pretty=False), encoding="utf-8")


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train on the texts.

    The same texts give the same file whatever the number of threads: the initial alphabet is fixed, and the
    library orders pairs of equal count by their ids.

    Args:
      texts: the train split.
      vocab_size: number of token ids, EOT included; fewer are used where the texts have too few pairs.

    Raises:
      InputError: the vocabulary has no room for every byte and EOT.
    """
    if vocab_size < MIN_VOCAB:
        raise InputError(
            f"model.vocab_size is {vocab_size}, but must be at least {MIN_VOCAB}: one token a byte and {EOT_TEXT}."
        )
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOT_TEXT],  # specials come first, which makes EOT 0
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return Tokenizer(backend)


def load_tokenizer(path: Path, vocab_size: int) -> Tokenizer:
    """Read a tokenizer that `Tokenizer.save` wrote.

    Args:
      path: its JSON file.
      vocab_size: of the model; the tokenizer may use fewer.

    Raises:
      InputError: the file is missing or is not such a tokenizer, or it has more tokens than the model.
    """
    try:
        backend = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises bare Exception
        raise InputError(f"The tokenizer file {path} cannot be read: {error}.") from error
    if backend.token_to_id(EOT_TEXT) != EOT:
        raise InputError(f"The tokenizer file {path} must have the token {EOT_TEXT} with id {EOT}.")
    tokenizer = Tokenizer(backend)
    if tokenizer.vocab_size > vocab_size:
        raise InputError(
            f"The tokenizer file {path} has {tokenizer.vocab_size} tokens, more than model.vocab_size ({vocab_size}); "
            "give the model at least as many."
        )
    return tokenizer
