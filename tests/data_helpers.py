"""Sources of given documents, and what a run reads of them."""

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from zaya_jax.config import Config, from_dict
from zaya_jax.data.loading.batches import Batch, heldout_text
from zaya_jax.data.prepare.manifest import Manifest
from zaya_jax.data.prepare.preparation import TOKENIZER, write_merged
from zaya_jax.data.prepare.shard_conversion import Conversion, Record, remove_notes
from zaya_jax.data.prepare.shards import Text, token_dtype
from zaya_jax.data.special_tokens import SpecialTokens
from zaya_jax.data.tokenizer import Tokenizer, train_tokenizer

VOCAB = 300


@functools.cache
def small_tokenizer() -> Tokenizer:
    """Trained on a few lines."""
    return train_tokenizer([f"def function_{i}(self, value):\n    return value + {i}\n" for i in range(50)], VOCAB)


def _records(unit: tuple[str, list[Any]]) -> Iterator[Record]:
    """The documents of a unit as they are."""
    split, documents = unit
    for document in documents:
        if document and isinstance(document[0], dict):
            yield Record(split, json.dumps(document).encode(), 9, 9)
        else:
            tokens = np.array(document, token_dtype(VOCAB))
            yield Record(split, tokens.tobytes(), len(tokens), len(tokens))


def heldout_batches(*arguments: Any, **options: Any) -> Iterator[Batch]:
    """The batches of `heldout_text`; none if no phase reads the source."""
    text = heldout_text(*arguments, **options)
    return text.read() if text else iter(())


def write_source(folder: Path, train: list[Any], heldout: list[Any], kind: str = "tokens", shards: int = 1) -> Manifest:
    """A prepared folder of the documents: lists of token ids, or conversations."""
    folder.mkdir(parents=True)
    small_tokenizer().save(folder / TOKENIZER)
    cut = -(-len(train) // shards)
    units = [("train", train[i * cut : (i + 1) * cut]) for i in range(shards)] + [("heldout", heldout)]
    Conversion(folder, units, [0] * len(units), "Fix it.").convert(_records, "test")
    special = SpecialTokens(*[small_tokenizer().eot_text] * 3)
    manifest = write_merged(folder, len(units), kind=kind, inputs="", special=special)
    remove_notes(folder)
    return manifest


def run_config(folder: Path, sources: list[str], phases: list[dict[str, Any]], *, steps: int = 8, batch: int = 8,
               seed: int = 0, **data: Any) -> Config:  # fmt: skip
    """A checked configuration that reads the sources `folder/NAME`.

    Phases are as in YAML, but begin at a `first_step` (the first at 0) and have `batch` sequences a step.
    """
    phases = phases or [{}]
    firsts = [phase.get("first_step", 0) for phase in phases] + [steps]
    parts = []
    for index, phase in enumerate(phases):
        size = batch * (phase.get("context") or data.get("context", 16))
        parts.append({"name": f"phase{index}", "tokens": (firsts[index + 1] - firsts[index]) * size,
                      "batch": {"tokens": size}, **phase})  # fmt: skip
        parts[-1].pop("first_step", None)
    return from_dict({
        "model": {"vocab_size": VOCAB, "hidden_size": 8, "num_layers": 1, "num_query_heads": 2, "num_kv_heads": 2,
                  "head_dim": 4, "num_experts": 2, "expert_size": 8, "router_size": 4, "max_positions": 512},
        "run_dir": str(folder / "run"),
        "seed": seed,
        "data": {"sources": {name: {"path": str(folder / name)} for name in sources},
                 "cache_dir": str(folder / "cache"), "context": 16, **data},
        "phases": parts,
        "evaluation": {"batch_size": 3},
    })  # fmt: skip


class Numbered:
    """Documents whose tokens are 1, 2, 3, … through all of them: a token says where it stands."""

    def __init__(self, lengths, counts=None):
        self.lengths = np.array(lengths, np.int64)
        self.starts = np.cumsum(lengths) - lengths + 1
        self.counts = counts  # bool [1 + tokens], by token; None counts all

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        tokens = np.arange(self.starts[index], self.starts[index] + self.lengths[index], dtype=np.uint16)
        return Text(tokens, None if self.counts is None else self.counts[tokens])

    def counted(self, tokens):
        """Those whose loss counts."""
        return [token for token in tokens if self.counts is None or self.counts[token]]
