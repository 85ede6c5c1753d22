"""Registry of the input formats.

To add a format, add a module to this package that defines `FORMAT`, and a line to `FORMATS`.
"""

from collections.abc import Iterator
from importlib import import_module

from zaya_jax.data.readers.unit import Entry, Format, Unit

PACKED = ("gz", "zst", "bz2", "xz")
# Module name, which is also `Unit.format` → suffixes of its files.
FORMATS: dict[str, tuple[str, ...]] = {
    # C4 and Dolma call compressed JSON lines `.json.gz`.
    "jsonl": (".jsonl", ".ndjson", *(f".{name}.{packed}" for name in ("jsonl", "ndjson", "json") for packed in PACKED)),
    "parquet": (".parquet",),
    "arrow": (".arrow",),
    "megatron": (".bin",),
    "text": (),  # suffixes are an argument of `list_units`
}


def load_format(name: str) -> Format:
    """Import a format of `FORMATS` on first use, because those of tables need pyarrow."""
    return import_module(f"zaya_jax.data.readers.{name}").FORMAT


def read_unit(unit: Unit, *, field: str) -> Iterator[Entry]:
    """Read the documents of a unit in order, with only a few of them in memory.

    The units of `list_units`, read in order, yield every document of the inputs exactly once and in order.

    Args:
      unit: one of `list_units`.
      field: JSON key or column that contains the document; ignored for text and Megatron files.

    Returns:
      An iterator over a `Document` for each text that is not only white space, non-empty list, or array of token ids,
      and a `BadDocument` for anything else. Blank lines of JSONL are skipped.

    Raises:
      InputError: during iteration: a file cannot be read, is damaged, or has no such column.
    """
    return load_format(unit.format).read(unit, field)
