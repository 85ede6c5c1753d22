"""Render conversations with a chat template, trim them, and cache the tokens."""

import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from zaya_jax.data.chat.conversation import Conversation, find_special, split_tools
from zaya_jax.data.chat.template import Span, Template, encode_pieces, load_template
from zaya_jax.data.chat.trimming import trim
from zaya_jax.data.prepare.document_encoder import load_tokenizer_once
from zaya_jax.data.prepare.manifest import (
    FORMAT,
    MANIFEST,
    Manifest,
    ShardEntry,
    Split,
    json_digest,
    read_manifest,
    verify_files,
)
from zaya_jax.data.prepare.preparation import TOKENIZER, write_merged
from zaya_jax.data.prepare.shard_conversion import Conversion, Record, refuse_in_worker, remove_notes
from zaya_jax.data.prepare.shards import Records, pack_text, token_dtype
from zaya_jax.data.prepare.workers import watch
from zaya_jax.data.readers.documents import BadDocument
from zaya_jax.data.special_tokens import SpecialTokens, other_tokens
from zaya_jax.errors import InputError
from zaya_jax.run.files import locked, write_atomically
from zaya_jax.run.writing import make_folder, require_trusted

_CHECKS = 3  # version of what `Template.render` refuses; older renderings are not used


@dataclass(frozen=True)
class RenderWork:
    """Renders a shard of conversations as records of tokens and a loss mask that covers assistant turns only."""

    tokenizer: Path
    special: SpecialTokens
    template: Template
    limit: int | None  # maximum tokens of a conversation; None disables trimming
    folder: Path  # prepared conversations
    split: Split

    def __call__(self, shard: ShardEntry) -> Iterator[Record | BadDocument]:
        """Yield one record per conversation; one that cannot be trimmed to fit has no tokens, and keeps its index."""
        tokenizer = load_tokenizer_once(self.tokenizer, self.tokenizer.parent.name, self.special)
        dtype = token_dtype(tokenizer.vocab_size)
        records, others = Records(self.folder, (shard,)), other_tokens(self.folder)
        controls = tokenizer.controls(self.template.source) | tokenizer.specials

        def render(conversation: Conversation, tools: list[dict[str, Any]] | None) -> list[Span]:
            special = {"bos": self.special.bos, "eos": self.special.eos, "others": others}
            pieces = self.template.render(conversation, tools=tools, **special)
            return encode_pieces(pieces, tokenizer.encode_rendering)

        for number in watch(range(len(records)), functools.partial(_refuse, self.folder / shard.file)):
            data = records[number]
            conversation, tools = split_tools(json.loads(data))
            try:
                if control := find_special([*conversation, *(tools or [])], controls):
                    raise ValueError(f"it contains the text {control!r}, which only the template may write")
                if self.limit is None:
                    spans, outcome = render(conversation, tools), None
                else:
                    spans, outcome = trim(conversation, self.limit, functools.partial(render, tools=tools))
            except ValueError as error:
                yield BadDocument(str(self.folder / shard.file), number, "template", str(error))
                continue
            spans = spans or []
            written = {span.reasoning for span in spans} - {None}
            reasonings = [each for each in conversation if each["role"] == "assistant" and each.get("reasoning")]
            if outcome in (None, "kept") and len(written) < len(reasonings):
                outcome = "earlier_removed"  # by the template
            tokens = np.array([token for span in spans for token in span.tokens], dtype)
            loss_mask = np.repeat([span.generated for span in spans], [len(span.tokens) for span in spans]).astype(bool)
            text_bytes = len(tokenizer.decode(tokens[loss_mask].tolist()).encode())
            yield Record(self.split, pack_text(tokens, loss_mask), len(tokens), text_bytes, len(data), outcome)


def _refuse(shard: Path, number: int, reason: str) -> int:
    raise InputError(f"The conversation {shard}:{number} cannot be rendered: {reason}.")


def open_rendered(
    folder: Path, manifest: Manifest, split: Split, template: str | None, limit: int | None, cache: Path
) -> tuple[Path, Manifest]:
    """Render a split of a prepared folder of conversations, or return the rendering cached in `cache/DIGEST`.

    If several processes share a file system, one renders with all its cores, resumably, and the others wait. `template`
    is the path of a Jinja file, or None for the built-in one; `limit`, if any, the maximum tokens, see `trim`.

    Return a folder of kind 'masked' and its manifest, whose `counts` are the trimming outcomes and whose other split is
    empty. A document that cannot be trimmed to fit has no tokens. `InputError` if the template is unusable, or fails.
    """
    refuse_in_worker()  # a worker would wait forever for the lock that its parent holds
    loaded = load_template(template)
    inputs = json_digest(FORMAT, _CHECKS, manifest.content, split, loaded.digest, limit, other_tokens(folder))
    target = cache / inputs
    remedy = f"Delete the folder {target}; the next run creates it again."
    with locked(target.with_suffix(".lock"), "The folder data.cache_dir"):
        if not (target / MANIFEST).exists():
            make_folder(target)
            write_atomically(target / TOKENIZER, (folder / manifest.tokenizer.file).read_text(encoding="utf-8"))
            work = RenderWork(target / TOKENIZER, manifest.special, loaded, limit, folder, split)
            shards = manifest.split(split).shards
            advice = f"The chat template {loaded.name} must render all of them."
            conversion = Conversion(target, shards, [shard.bytes for shard in shards], advice, workers=None)
            conversion.convert(work, f"rendering the {split} conversations of {folder.name}")
            write_merged(target, len(shards), kind="masked", inputs=inputs, special=manifest.special)
            remove_notes(target)
    require_trusted(target)
    rendered = read_manifest(target, remedy)
    verify_files(target, rendered, cache, remedy)
    return target, rendered
