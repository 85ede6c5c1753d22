"""The formats of input, and the documents of a unit of any of them.

A format is a module of this package whose `FORMAT` says how its files are cut and read, and a line of `FORMATS`.
"""

from collections.abc import Iterator
from importlib import import_module

from zaya_jax.data.readers.unit import Entry, Format, Unit

# The endings of each format's files, by the name of its module, which `Unit.format` is too.
FORMATS: dict[str, tuple[str, ...]] = {
    "jsonl": (".jsonl", ".jsonl.gz", ".jsonl.zst", ".ndjson", ".ndjson.gz", ".ndjson.zst"),
    "parquet": (".parquet",),
    "arrow": (".arrow",),
    "megatron": (".bin",),
    "text": (),  # chosen by the caller of `list_units`
}


def load_format(name: str) -> Format:
    """A format of `FORMATS`, whose module is imported by then and not before: those of tables need pyarrow."""
    return import_module(f"zaya_jax.data.readers.{name}").FORMAT


def read_unit(unit: Unit, *, field: str) -> Iterator[Entry]:
    """Read a unit from its beginning to its end, never holding more of it than a few documents.

    The units of `list_units`, read in order, give every document of the inputs once and in order.

    Args:
      unit: one of `list_units`.
      field: the JSON key or the column that holds the document; text and Megatron files have none.

    Returns:
      An iterator of `Document`, where there is a text that is not only white space, a list that is not empty, or
      token ids, and of `BadDocument`, where there is something else. Blank lines of JSONL are left out.

    Raises:
      InputError: while it is iterated over: a file cannot be read, is damaged, or has no such column.
    """
    return load_format(unit.format).read(unit, field)
