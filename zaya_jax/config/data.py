"""The data that a run reads."""

from dataclasses import dataclass, field

from zaya_jax.config.bounds import Positive
from zaya_jax.config.checks import is_name, require, require_path
from zaya_jax.config.table import Table

CORPUS = "corpus"  # the source's name where data.sources names none


@dataclass(frozen=True)
class SourceConfig:
    """A folder that `python -m zaya_jax.data prepare` wrote."""

    path: str  # the folder
    max_epochs: Positive[float] | None = None  # times a run may read it at most


@dataclass(frozen=True)
class DataConfig:
    """Prepared sources, or the text files of a folder as the only source, 'corpus'."""

    corpus: str = "stdlib"  # 'stdlib' (the source of the running Python's standard library) or a folder
    suffixes: tuple[str, ...] = (".py",)  # files taken from the folder
    heldout_fraction: float = 0.04  # of the files, by a hash of their content
    sources: Table[SourceConfig] = field(
        default_factory=Table[SourceConfig]
    )  # read instead of the corpus if any is given
    cache_dir: str = "runs/data"  # what is made of sources and corpus is kept here, by content
    context: Positive[int] = 512  # tokens a row, of phases that do not say and of held-out text
    workers: int = 0  # processes that make batches; with 0, threads of the training process do

    def check(self) -> None:
        """Raise `InputError` for a value outside its range."""
        require_path("data.corpus", self.corpus)
        require_path("data.cache_dir", self.cache_dir)
        require(0 < self.heldout_fraction < 1, "data.heldout_fraction", self.heldout_fraction, "between 0 and 1")
        require(len(self.suffixes) > 0, "data.suffixes", list(self.suffixes), "a list of at least one file suffix")
        require(0 <= self.workers <= 256, "data.workers", self.workers, "between 0 and 256")
        for name, source in self.sources.items():
            require(is_name(name), "data.sources", name, "a name of at most 200 letters, digits, _ and -")
            require(source.path != "", f"data.sources.{name}.path", source.path, "the path of a folder")
            require_path(f"data.sources.{name}.path", source.path)

    @property
    def source_names(self) -> list[str]:
        """The names of the sources."""
        return list(self.sources) or [CORPUS]
