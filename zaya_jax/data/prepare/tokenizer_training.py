"""Train a tokenizer on documents, and measure on others how well it compresses each source."""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from zaya_jax.config.checks import counted, list_counts, require
from zaya_jax.data.chat.conversation import parse_record
from zaya_jax.data.prepare.document_encoder import message_texts
from zaya_jax.data.prepare.manifest import content_hash
from zaya_jax.data.readers.documents import BadDocument, Entry, Unit
from zaya_jax.data.readers.inputs import list_units, read_unit
from zaya_jax.data.tokenizer import EOT_TEXT, Tokenizer, train_tokenizer
from zaya_jax.errors import InputError, printable
from zaya_jax.run.figures import panels
from zaya_jax.run.files import json_text, write_atomically
from zaya_jax.run.table import NONE, format_table
from zaya_jax.run.tokenizer import TOKENIZER, TOKENIZER_CONFIG, tokenizer_settings
from zaya_jax.run.writing import make_folder

PICTURE = "compression.png"
_MEASURED = 0.05  # share of documents, chosen by a hash of their text, that are measured instead of trained on
_MOST_MEASURED = 10_000_000  # bytes measured of a source


@dataclass
class _Source:
    name: str
    units: list[Unit]
    key: str  # JSON key or column
    trained: int = 0  # documents
    measured: list[str] = field(default_factory=list)
    measured_bytes: int = 0


class TrainingTexts:
    """The texts of documents: iterating yields those to train on, and keeps those to measure."""

    def __init__(
        self,
        inputs: Sequence[str],
        fields: Sequence[str],
        suffixes: tuple[str, ...] = (".txt",),
        most_bytes: int = 10**9,
        max_bad: int = 0,
    ) -> None:
        """List the inputs, each of which is a source; `InputError` if one cannot be used.

        `fields` are JSON keys or columns: one, or one for each input. Messages of a conversation are separate texts. Of
        more than `most_bytes` of input, a part of each source is trained on. Iterating ends after `max_bad` bad ones.
        """
        require(most_bytes > 0, "--bytes", most_bytes, "greater than 0")
        require(max_bad >= 0, "--max-bad", max_bad, "at least 0")
        require(len(fields) in (1, len(inputs)), "--field", " ".join(fields), "one name, or one for each --input")
        pairs = zip(inputs, list(fields) * (len(inputs) // len(fields)), strict=True)
        self.sources = [_Source(path, list_units([path], suffixes=suffixes), key) for path, key in pairs]
        total = sum(unit.bytes for source in self.sources for unit in source.units)
        self.share = min(1.0, most_bytes / max(total, 1))  # of the documents that are not measured
        self._max_bad, self._bad, self._first = max_bad, Counter[str](), ""

    def __iter__(self) -> Iterator[str]:
        for source in self.sources:
            for unit in source.units:
                for entry in read_unit(unit, field=source.key):
                    if self._bad.total() > self._max_bad:
                        return  # `check` raises
                    yield from self._texts(source, entry)

    def _texts(self, source: _Source, entry: Entry) -> Iterator[str]:
        try:
            if isinstance(entry, BadDocument):
                raise ValueError(entry.detail)
            if not isinstance(entry.value, str | list | dict):
                raise ValueError("it has token ids, not text")
            texts = [entry.value] if isinstance(entry.value, str) else message_texts(parse_record(entry.value)[0])
            place = content_hash("".join(texts).encode()) / 2**64
        except ValueError as error:
            reason = entry.reason if isinstance(entry, BadDocument) else "not a conversation"
            self._first = self._first or f"{entry.file}:{entry.line}: {error}"
            self._bad[reason] += 1
            return
        if place < _MEASURED:
            if source.measured_bytes < _MOST_MEASURED:
                source.measured += texts
                source.measured_bytes += sum(len(text.encode()) for text in texts)
        elif place < _MEASURED + (1 - _MEASURED) * self.share:
            source.trained += 1
            yield from texts

    def check(self) -> str:
        """Return a sentence on documents that were left out; `InputError` if they were too many, or none is left."""
        bad = self._bad.total()
        if bad > self._max_bad:
            problem = f"{counted(bad, 'document')} cannot be used ({list_counts(self._bad)})"
            raise InputError(f"{problem}; the first is {self._first}. Fix them, or skip up to N with --max-bad N.")
        if not any(source.trained for source in self.sources):
            raise InputError(
                f"The inputs contain no document to train on: {', '.join(source.name for source in self.sources)}."
            )
        return f"Left out: {counted(bad, 'document')} ({list_counts(self._bad)})." if bad else ""


def train_on(texts: TrainingTexts, output: Path, vocab_size: int, special: Sequence[str] = ()) -> str:
    """Train a tokenizer, write it with its settings and a picture into a folder, and return a report.

    `InputError`, before anything is written, if the folder is not empty, or an input or setting cannot be used.
    """
    is_free = not os.path.lexists(output) or (output.is_dir() and not any(output.iterdir()))
    require(is_free, "--output", str(output), "a new or empty folder")
    tokenizer = train_tokenizer(texts, vocab_size, special, key="--vocab-size")
    left_out = texts.check()
    rows, ratios = [], dict[str, float]()
    for source in texts.sources:
        tokens = sum(map(len, tokenizer.encode_all(source.measured)))
        if tokens:
            ratios[source.name] = source.measured_bytes / tokens
        ratio = f"{ratios[source.name]:.2f}" if tokens else NONE
        rows.append((source.name, f"{source.trained:,}", f"{source.measured_bytes:,}", f"{tokens:,}", ratio))
    make_folder(output)
    _draw(output / PICTURE, ratios, tokenizer)
    settings = tokenizer_settings(EOT_TEXT, EOT_TEXT, EOT_TEXT)
    write_atomically(output / TOKENIZER_CONFIG, json_text(settings))
    tokenizer.save(output / TOKENIZER)  # last: `prepare` refuses a folder without it
    head = ("source", "documents trained on", "bytes measured", "tokens", "bytes/token")
    few = "" if tokenizer.vocab_size == vocab_size else f", fewer than {vocab_size:,}: the text has no more pairs"
    names = ", ".join([EOT_TEXT, *special])
    size = f"{tokenizer.vocab_size:,} tokens{few}; {tokenizer.bytes_covered} of 256 bytes; special: {names}"
    part = f"Trained on {100 * texts.share:.3g} % of the documents (--bytes)." if texts.share < 1 else ""
    lines = [f"{output / TOKENIZER}: {size}.", part, left_out, *format_table([head, *rows])]
    return "\n".join(map(printable, filter(None, lines)))


def _draw(path: Path, ratios: dict[str, float], tokenizer: Tokenizer) -> None:
    title = f"Compression of a tokenizer of {tokenizer.vocab_size:,} tokens, on documents that it was not trained on"
    with panels(path, title, size=(7.5, 1.5 + 0.4 * len(ratios))) as (panel,):
        bars = panel.barh([printable(name, 60) for name in ratios], list(ratios.values()))
        panel.bar_label(bars, fmt="%.2f", padding=3)
        panel.invert_yaxis()
        panel.set(xlabel="bytes of text per token")
