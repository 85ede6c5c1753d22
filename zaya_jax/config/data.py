"""The data section of a configuration."""

from dataclasses import dataclass, field

from zaya_jax.config.bounds import Positive
from zaya_jax.config.checks import NAME, field_check, is_name, require, require_path
from zaya_jax.config.table import Table

CORPUS = "corpus"  # name of the only source if data.sources is empty
CORPUS_KEYS = ("corpus", "suffixes", "heldout_fraction")  # not read beside data.sources


@dataclass(frozen=True)
class SourceConfig:
    """A folder written by `python -m zaya_jax.data prepare`."""

    path: str  # folder that `python -m zaya_jax.data prepare` wrote
    max_epochs: Positive[float] | None = None  # maximum number of times the run may read the source


@dataclass(frozen=True)
class DataConfig:
    """Prepared sources, or a folder of text files as the only source, named 'corpus'."""

    corpus: str = "stdlib"  # folder of text files; 'stdlib': the source code of Python's standard library
    suffixes: tuple[str, ...] = (".py",)  # suffixes of the files to read from the folder
    heldout_fraction: float = 0.04  # fraction of files held out (between 0 and 1), by a hash of their content
    sources: Table[SourceConfig] = field(default_factory=Table[SourceConfig])  # prepared folders; replace the corpus
    cache_dir: str = "runs/data"  # folder for tokenized corpora and rendered conversations, keyed by content
    context: Positive[int] = 512  # tokens per row in phases that do not set their own
    workers: int = 0  # processes that build batches, at most 256; 0 uses threads of the training process
    skip_rows: tuple[tuple[int, int], ...] = ()  # ranges [first, end] of rows never to train on, in order

    def check(self) -> None:
        """Raise `InputError` if a value is out of range."""
        must = field_check(self, "data")
        require_path("data.corpus", self.corpus)
        require_path("data.cache_dir", self.cache_dir)
        must("heldout_fraction", 0 < self.heldout_fraction < 1, "between 0 and 1")
        must("suffixes", len(self.suffixes) > 0, "a list with at least one file suffix")
        must("workers", 0 <= self.workers <= 256, "between 0 and 256")
        before = 0
        for index, ends in enumerate(self.skip_rows):
            is_sorted = len(ends) == 2 and before <= ends[0] < ends[1]
            allowed = f"[first, end] with {before} <= first < end: ranges are sorted and do not overlap"
            require(is_sorted, f"data.skip_rows.{index}", ends, allowed)
            before = ends[1]
        for name, source in self.sources.items():
            require(is_name(name), "data.sources", name, NAME)
            require_path(f"data.sources.{name}.path", source.path, "the path of a folder")

    def check_read(self) -> None:
        """Raise `InputError` if a key of the corpus is set beside `sources`, which would leave it unread."""
        unread = "left out (or its default) beside data.sources, which replace the corpus"
        must = field_check(self, "data")
        for key in CORPUS_KEYS if self.sources else ():
            must(key, getattr(self, key) == getattr(DataConfig, key), unread)

    @property
    def source_names(self) -> list[str]:
        """Names of the sources; only 'corpus' if none is configured."""
        return list(self.sources) or [CORPUS]
