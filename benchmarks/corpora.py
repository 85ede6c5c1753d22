"""Inputs of the data benchmark: JSONL of real text, and prepared folders of random documents."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from zaya_jax.data.convert import Conversion, Record, remove_notes
from zaya_jax.data.manifest import Manifest, json_digest
from zaya_jax.data.prepare import TOKENIZER, write_merged
from zaya_jax.data.shards import token_dtype
from zaya_jax.data.special_tokens import SpecialTokens
from zaya_jax.data.tokenizer import load_tokenizer

_MEDIAN, _SIGMA = 700, 1.1  # log-normal distribution of document lengths, in tokens
_HELDOUT_EVERY = 100  # documents


def write_lines(path: Path, texts: Sequence[str], size: int) -> None:
    """Write JSONL of at least `size` bytes: all texts in random order, repeated as often as needed."""
    rng, left = np.random.default_rng(0), size
    with path.open("wb") as file:
        while left > 0:
            for index in rng.permutation(len(texts)):
                left -= file.write(json.dumps({"text": texts[index]}).encode() + b"\n")
                if left <= 0:
                    break


def write_drawn(folder: Path, tokenizer: Path, tokens: int, shards: int) -> Manifest:
    """Write a new prepared folder of random documents, with about a hundredth of them held out.

    It has at least so many training tokens, in shards of equal size, of the vocabulary of a `tokenizer.json`.
    """
    folder.mkdir()
    (folder / TOKENIZER).write_bytes(tokenizer.read_bytes())
    loaded = load_tokenizer(tokenizer)
    [eot] = loaded.encode_template(loaded.eot_text)
    draw = Draw(loaded.vocab_size, eot, -(-tokens // shards))
    invalid = "The benchmark generated invalid documents; please report it."
    Conversion(folder, range(shards), [draw.bytes] * shards, invalid).convert(draw, "drawing documents")
    special = SpecialTokens(*[loaded.eot_text] * 3)
    manifest = write_merged(folder, shards, kind="tokens", inputs=json_digest(draw, shards), special=special)
    remove_notes(folder)
    return manifest


class Draw(NamedTuple):
    """Draws documents with log-normal lengths and Zipf-distributed tokens."""

    vocab_size: int
    eot: int
    tokens: int  # training tokens of a unit

    @property
    def bytes(self) -> int:
        """Bytes of a unit's training tokens."""
        return self.tokens * token_dtype(self.vocab_size).itemsize

    def __call__(self, unit: int) -> Iterator[Record]:
        """Draw the documents of a unit, which depend on its number only."""
        rng, dtype, drawn, nth = np.random.default_rng(unit), token_dtype(self.vocab_size), 0, 0
        frequency = 1 / np.arange(2, self.vocab_size + 2)
        frequency[self.eot] = 0
        steps = np.cumsum(frequency)
        while drawn < self.tokens:
            tokens = np.full(2 + max(1, int(rng.lognormal(np.log(_MEDIAN), _SIGMA))), self.eot, dtype)
            tokens[1:-1] = np.searchsorted(steps, steps[-1] * rng.random(len(tokens) - 2), side="right")
            split = "heldout" if nth % _HELDOUT_EVERY == 0 else "train"
            trained = len(tokens) if split == "train" else 0
            yield Record(split, tokens.tobytes(), len(tokens), 4 * len(tokens), trained * dtype.itemsize)
            drawn, nth = drawn + trained, nth + 1
