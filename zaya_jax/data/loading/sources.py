"""Open the prepared sources of a run, and check that they fit each other and the model."""

import functools
from dataclasses import dataclass, field
from pathlib import Path

from zaya_jax.config import Config, PhaseConfig
from zaya_jax.config.data import CORPUS
from zaya_jax.data.loading.rendering import open_rendered
from zaya_jax.data.loading.text_corpus import cache_remedy, corpus_baselines, open_corpus
from zaya_jax.data.prepare.manifest import Manifest, Split, verify_files
from zaya_jax.data.prepare.preparation import open_manifest, remedy
from zaya_jax.data.prepare.shards import Documents, open_documents
from zaya_jax.data.tokenizer import Tokenizer, check_vocabulary, load_tokenizer
from zaya_jax.errors import InputError
from zaya_jax.run.files import expanded, explained
from zaya_jax.run.writing import make_folder


@dataclass(frozen=True)
class Source:
    """A prepared folder that a run reads."""

    name: str
    folder: Path
    manifest: Manifest
    max_epochs: float | None = None


@dataclass(frozen=True)
class Prepared:
    """The verified sources of a run, which share one tokenizer."""

    tokenizer: Tokenizer
    sources: dict[str, Source]
    config: Config = field(repr=False, compare=False)
    cache: Path  # data.cache_dir
    _opened: dict[tuple[str, str], Documents] = field(default_factory=dict, repr=False, compare=False)

    @functools.cached_property
    def baselines(self) -> dict[str, float]:
        """Bits per byte by compressor, see `compressor_baselines`; {} with `data.sources`. The first use takes time."""
        return {} if self.config.data.sources else corpus_baselines(self.config, self.sources[CORPUS].folder)

    def open(self, name: str, split: Split, phase: PhaseConfig, context: int) -> tuple[Documents, Manifest]:
        """Open the documents of a source as `phase` reads them, see `open_rendered`, and return the manifest, too."""
        source = self.sources[name]
        folder, manifest = source.folder, source.manifest
        if manifest.kind == "chat":
            limit = context + 1 if phase.over_length == "trim" else None
            folder, manifest = open_rendered(folder, manifest, split, phase.template, limit, self.cache)
        key = str(folder), split
        if key not in self._opened:  # once, so that phases share the array of lengths
            self._opened[key] = open_documents(folder, manifest, split)
        return self._opened[key], manifest


def open_sources(config: Config) -> Prepared:
    """Open and verify the folders of `data.sources`, or prepare `data.corpus` if there are none.

    `InputError` if a folder is missing, incomplete or damaged, the sources have different tokenizers, the tokenizer has
    more tokens than the model, a source has no training document, or none has a held-out document.
    """
    cache = expanded(config.data.cache_dir)
    with explained(f"The folder data.cache_dir ({cache}) cannot be written"):
        make_folder(cache)
    sources: dict[str, Source] = {}
    for name, source in config.data.sources.items():
        folder = expanded(source.path)
        try:
            sources[name] = Source(name, folder, open_manifest(folder), source.max_epochs)
        except InputError as error:
            raise InputError(f"data.sources.{name} cannot be read. {error}") from error
    if not sources:
        sources[CORPUS] = Source(CORPUS, *open_corpus(config))
    _check_sources(config, sources)
    for source in sources.values():
        advice = remedy(source.folder) if config.data.sources else cache_remedy(source.folder)
        try:
            verify_files(source.folder, source.manifest, cache, advice)
        except OSError as error:
            raise InputError(f"{error.filename} cannot be used: {error.strerror}.") from error
    first = next(iter(sources.values()))
    path = first.folder / first.manifest.tokenizer.file
    tokenizer = load_tokenizer(path, first.manifest.eot, first.manifest.bos)
    check_vocabulary(tokenizer, config.model.vocab_size, path)
    return Prepared(tokenizer, sources, config, cache)


def _check_sources(config: Config, sources: dict[str, Source]) -> None:
    first, *_ = (source.manifest for source in sources.values())
    one = f"data.sources.{next(iter(sources))}"
    for name, manifest in ((name, source.manifest) for name, source in sources.items()):
        if (manifest.tokenizer.digest, manifest.eot) != (first.tokenizer.digest, first.eot):
            advice = "prepare both with the same tokenizer.json"
            raise InputError(f"data.sources.{name} and {one} were prepared with different tokenizers; {advice}.")
        if None is not manifest.bos != first.bos is not None:
            other = f"but those of {one} begin with {first.bos!r}; prepare both with the same --bos."
            raise InputError(f"Documents of data.sources.{name} begin with {manifest.bos!r}, {other}")
        for index, phase in enumerate(config.phases):
            if not manifest.train.documents and phase.mixture.get(name):
                raise InputError(
                    f"data.sources.{name} contains no training document for {config.phase_key(index)}. To only "
                    "evaluate it, set its weight in the mixture to 0; otherwise prepare it with a smaller --heldout."
                )
    if not any(source.manifest.train.documents for source in sources.values()):
        named = ", ".join(sources)
        problem = "contains a training document; prepare one with a smaller --heldout"
        raise InputError(f"None of the sources ({named}) {problem}.")
    read = {name for phase in config.phases for name in phase.mixture or sources}
    if not any(sources[name].manifest.heldout.documents for name in read):
        why = "so there is nothing to evaluate; prepare one with a larger --heldout, or more documents."
        raise InputError(f"No source that a phase reads ({', '.join(sorted(read))}) has a held-out document, {why}")
