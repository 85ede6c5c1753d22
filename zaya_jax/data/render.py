"""Conversations as tokens: rendered by a template, trimmed to fit, and cached."""

import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from zaya_jax.data.chat import Conversation, Span, Template, encode_pieces, load_template
from zaya_jax.data.convert import Conversion, Record, Skipped, default_workers, refuse_in_worker, remove_notes
from zaya_jax.data.corpus import Split
from zaya_jax.data.manifest import FORMAT, MANIFEST, Manifest, ShardEntry, json_digest, read_manifest
from zaya_jax.data.prepare import TOKENIZER, write_merged
from zaya_jax.data.shards import Records, pack_text, token_dtype
from zaya_jax.data.special_tokens import SpecialTokens
from zaya_jax.data.tokenizer import Tokenizer, load_tokenizer
from zaya_jax.data.trimming import trim
from zaya_jax.data.verify import verify_files
from zaya_jax.run.files import locked, write_atomically


@dataclass(frozen=True)
class RenderWork:
    """A shard of conversations to records of tokens and a loss mask that covers assistant turns only."""

    tokenizer: Path
    special: SpecialTokens
    template: Template
    limit: int | None  # tokens; None trims nothing
    folder: Path  # of the conversations
    split: Split

    def __call__(self, shard: ShardEntry) -> Iterator[Record | Skipped]:
        """A record a conversation; one that cannot fit has no tokens, and so keeps its number."""
        tokenizer = _tokenizer(self.tokenizer, self.special)
        dtype = token_dtype(tokenizer.vocab_size)
        records = Records(self.folder, (shard,))

        def render(conversation: Conversation) -> list[Span]:
            pieces = self.template.render(conversation, bos=self.special.bos, eos=self.special.eos)
            return encode_pieces(pieces, tokenizer.encode_rendering)

        for number in range(len(records)):
            data = records[number]
            conversation = json.loads(data)
            try:
                if self.limit is None:
                    spans, outcome = render(conversation), None
                else:
                    spans, outcome = trim(conversation, self.limit, render)
            except ValueError as error:
                yield Skipped(f"{self.folder / shard.file}:{number}", "template", str(error))
                continue
            spans = spans or []
            tokens = np.array([token for span in spans for token in span.tokens], dtype)
            loss_mask = np.repeat([span.generated for span in spans], [len(span.tokens) for span in spans]).astype(bool)
            text_bytes = len(tokenizer.decode(tokens[loss_mask].tolist()).encode())
            yield Record(self.split, pack_text(tokens, loss_mask), len(tokens), text_bytes, len(data), outcome)


def open_rendered(folder: Path, manifest: Manifest, split: Split, template: str | None, limit: int | None,
                  cache: Path) -> tuple[Path, Manifest]:  # fmt: skip
    """Find a split of the conversations of a prepared folder written out as tokens, or write it out.

    The result lies in `cache/DIGEST`. Of several processes on one file system one makes it, with all its cores, and
    the others wait; what a killed one has done is not done again.

    Args:
      folder: of the kind 'chat'.
      manifest: of it.
      split: of it.
      template: a Jinja file; None is the built-in one.
      limit: tokens that a conversation may have, see `trim`; None trims nothing.
      cache: a folder.

    Returns:
      A folder of the kind 'masked' and its manifest, in which the other split is empty. Its documents are those of
      `folder` in the same order; one that cannot fit has no tokens. Counted are the outcomes of trimming.

    Raises:
      InputError: the template cannot be used, or a conversation with it.
      RunStopped: a process was killed.
    """
    refuse_in_worker()  # which would wait for its parent
    loaded = load_template(template)
    inputs = json_digest(FORMAT, manifest.content, split, loaded.digest, limit)
    target = cache / inputs
    remedy = f"Delete the folder {target}; the next run creates it again."
    with locked(target.with_suffix(".lock"), "The folder data.cache_dir"):
        if not (target / MANIFEST).exists():
            _render(folder, manifest, split, loaded, limit, target, inputs)
    rendered = read_manifest(target, remedy)
    verify_files(target, rendered, cache, remedy)
    return target, rendered


def _render(folder: Path, manifest: Manifest, split: Split, template: Template, limit: int | None, target: Path,
            inputs: str) -> None:  # fmt: skip
    target.mkdir(exist_ok=True)
    write_atomically(target / TOKENIZER, (folder / manifest.tokenizer.file).read_text(encoding="utf-8"))
    shards = manifest.split(split).shards
    work = RenderWork(target / TOKENIZER, manifest.special, template, limit, folder, split)
    conversion = Conversion(target, shards, [shard.bytes for shard in shards],
                            f"The chat template {template.name} must render all of them.",
                            workers=default_workers())  # fmt: skip
    conversion.convert(work, f"rendering the {split} conversations of {folder.name}")
    write_merged(target, len(shards), kind="masked", inputs=inputs, special=manifest.special)
    remove_notes(target)


@functools.lru_cache(maxsize=1)
def _tokenizer(path: Path, special: SpecialTokens) -> Tokenizer:
    return load_tokenizer(path, special.eot, special.bos)  # its folder is named by what it holds
