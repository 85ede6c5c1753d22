"""Check documents, encode them as records and assign them to a split."""

import functools
import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np

from zaya_jax.data.chat.conversation import Conversation, find_special, parse_record, unread_keys
from zaya_jax.data.prepare.manifest import Kind, Split, content_hash
from zaya_jax.data.prepare.shard_conversion import Record
from zaya_jax.data.prepare.shards import token_dtype
from zaya_jax.data.prepare.workers import is_repeated, watch
from zaya_jax.data.readers.documents import BadDocument, Document, Entry, Unit
from zaya_jax.data.readers.fields import with_tools
from zaya_jax.data.readers.inputs import read_unit
from zaya_jax.data.special_tokens import SpecialTokens
from zaya_jax.data.tokenizer import Tokenizer, load_tokenizer
from zaya_jax.errors import InputError

_BATCH_DOCUMENTS, _BATCH_CHARACTERS = 256, 2**20  # limits of a batch that is encoded together


@dataclass(frozen=True)
class PrepareSettings:
    """The settings of a preparation that affect its output."""

    kind: Kind = "tokens"  # or 'chat' for conversations
    field: str = "text"  # key of JSON lines, column of Parquet and Arrow files
    suffixes: tuple[str, ...] = (".txt",)  # of text files, each of which is one document
    eot: str | None = None  # token that ends a document; None detects it
    heldout: float | Fraction = 0.01  # fraction of documents held out, by a hash of their content
    bos: str | None = None  # token that begins a document, or 'none'; None detects it, see `find_special_tokens`


@dataclass(frozen=True)
class PrepareWork:
    """Encodes a unit of input as records."""

    tokenizer: Path
    digest: str  # that tells apart tokenizers at this path, such as one of the file
    special: SpecialTokens
    settings: PrepareSettings

    def __call__(self, unit: Unit) -> Iterator[Record | BadDocument]:
        """Yield the records of a unit, in order."""
        for documents in _batched(watch(read_unit(unit, field=self.settings.field), _refuse)):
            yield from self._encode(self._tokenizer(), documents)

    def check(self, unit: Unit) -> Iterator[int | BadDocument]:
        """Yield each document's bytes, or why it cannot be used, without encoding it."""
        use = _check_conversation if self.settings.kind == "chat" else self._check_text
        for document in watch(read_unit(unit, field=self.settings.field), _refuse):
            used = use(self._tokenizer(), document)
            yield used if isinstance(used, BadDocument) else document.bytes

    def _encode(self, tokenizer: Tokenizer, documents: list[Entry]) -> list[Record | BadDocument]:
        """Encode documents; one on which the tokenizer fails cannot be used."""
        encode = self._conversations if self.settings.kind == "chat" else self._texts
        try:
            return list(encode(tokenizer, documents))
        except InputError as error:
            if len(documents) == 1:
                return [_unusable(documents[0], "tokenizer fails", str(error))]
        return [record for document in documents for record in self._encode(tokenizer, [document])]

    def _tokenizer(self) -> Tokenizer:
        return load_tokenizer_once(self.tokenizer, self.digest, self.special)

    def _check_text(self, tokenizer: Tokenizer, document: Entry) -> str | np.ndarray | BadDocument:
        """Return a document's text or token ids, or why it cannot be used."""
        if isinstance(document, BadDocument):
            return document
        if isinstance(document.value, np.ndarray):
            return _check_ids(tokenizer, document, document.value)
        if isinstance(document.value, str):
            return document.value
        problem = f"the field {self.settings.field!r} is not text; --chat reads conversations"
        return _unusable(document, "wrong type", problem)

    def _texts(self, tokenizer: Tokenizer, documents: list[Entry]) -> Iterator[Record | BadDocument]:
        """Encode each document between its begin token, if any, and its end token."""
        dtype = token_dtype(tokenizer.vocab_size)
        used = [self._check_text(tokenizer, document) for document in documents]
        encoded = tokenizer.encode_counted(value for value in used if isinstance(value, str))
        for document, value in zip(documents, used, strict=True):
            if isinstance(value, BadDocument):
                yield value
                continue
            if isinstance(value, str):
                (tokens, lost), text = next(encoded), value.encode()
                if tokenizer.eot in tokens:  # the tokenizer does not mark it as special
                    yield _unusable(document, "end token inside", f"its text contains the token {tokenizer.eot_text!r}")
                    continue
            else:
                # Decode to text, so that text and token ids of any dtype get the same split.
                tokens, lost, text = value.tolist(), 0, tokenizer.decode(value.tolist()).encode()
            data = np.array([*tokenizer.prefix, *tokens, tokenizer.eot], dtype)
            yield Record(self._split(text), data.tobytes(), len(data), len(text), document.bytes, lost=lost)

    def _conversations(self, tokenizer: Tokenizer, documents: list[Entry]) -> Iterator[Record | BadDocument]:
        """Serialize each conversation as JSON; counts tokens of contents, reasoning and calls, not the template's."""
        checked = [_check_conversation(tokenizer, document) for document in documents]
        texts = [[] if isinstance(each, BadDocument) else message_texts(each[0]) for each in checked]
        all_encoded = tokenizer.encode_counted(itertools.chain.from_iterable(texts))
        for document, each, own in zip(documents, checked, texts, strict=True):
            if isinstance(each, BadDocument):
                yield each
                continue
            (messages, data), encoded = each, list(itertools.islice(all_encoded, len(own)))
            tokens, lost = sum(len(ids) for ids, _ in encoded), sum(bytes_lost for _, bytes_lost in encoded)
            size, unread = sum(len(text.encode()) for text in own), [*document.unread, *unread_keys(messages)]
            yield Record(self._split(data), data, tokens, size, document.bytes, lost=lost, unread=unread)

    def _split(self, content: bytes) -> Split:
        """Return the split of a document by its content, so copies share a split."""
        return "heldout" if content_hash(content) < self.settings.heldout * 2**64 else "train"


def _check_ids(tokenizer: Tokenizer, document: Document, ids: np.ndarray) -> np.ndarray | BadDocument:
    """Strip begin and end tokens from token ids and validate the rest."""
    if tokenizer.prefix and ids[0] == tokenizer.prefix[0]:
        ids = ids[1:]
    if len(ids) and ids[-1] == tokenizer.eot:
        ids = ids[:-1]
    if len(ids) == 0 or not 0 <= ids.min() <= ids.max() < tokenizer.vocab_size:
        allowed = f"each at least 0 and below {tokenizer.vocab_size}, the size of the tokenizer's vocabulary"
        return _unusable(document, "invalid tokens", f"a document needs tokens, {allowed}")
    if (ids == tokenizer.eot).any():
        return _unusable(document, "end token inside", f"it contains the token {tokenizer.eot_text!r} before its end")
    return ids


def _check_conversation(tokenizer: Tokenizer, document: Entry) -> tuple[Conversation, bytes] | BadDocument:
    """Return a conversation and its record, or why the document cannot be used as one."""
    if isinstance(document, BadDocument):
        return document
    try:
        conversation, tools = parse_record(document.value)
    except ValueError as error:
        return _unusable(document, "not a conversation", str(error))
    if special := find_special([*conversation, *(tools or [])], tokenizer.specials):
        return _unusable(document, "special token", f"it contains the text {special!r}, which would end a turn")
    try:
        # The order of a message's keys does not matter, that of tools and arguments is kept.
        record = with_tools([dict(sorted(message.items())) for message in conversation], tools)
        return conversation, json.dumps(record, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError) as error:  # a date of a table, half of a surrogate pair
        return _unusable(document, "not a conversation", f"it contains a value that JSON cannot represent: {error}")


def message_texts(conversation: Conversation) -> list[str]:
    """List the contents, reasoning and calls of a conversation, without what a template adds."""
    texts = []
    for message in conversation:
        calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls") or ()]
        reasoning = message.get("reasoning") if message["role"] == "assistant" else None
        texts += filter(None, [reasoning, message.get("content"), *calls])
    return texts


def _unusable(document: Entry, reason: str, detail: str) -> BadDocument:
    return BadDocument(document.file, document.line, reason, detail)


def _refuse(document: Entry, detail: str) -> Entry:
    return BadDocument(document.file, document.line, "ended its process", detail)


def _batched(documents: Iterable[Entry]) -> Iterator[list[Entry]]:
    """Group documents into batches, large enough for all cores and small enough for memory."""
    batch, size, longest = [], 0, 1 if is_repeated() else _BATCH_DOCUMENTS
    for document in documents:
        batch.append(document)
        value = document.value if isinstance(document, Document) else ""
        size += 1 if isinstance(value, np.ndarray) else len(str(value))
        if len(batch) == longest or size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    yield batch


@functools.lru_cache(maxsize=1)
def load_tokenizer_once(path: Path, digest: str, special: SpecialTokens) -> Tokenizer:
    """Load a tokenizer, and keep the last one; `digest` tells apart files at one path."""
    del digest  # part of the cache key: the file at the path can change
    return load_tokenizer(path, special.eot, special.bos, eos_text=special.eos)
