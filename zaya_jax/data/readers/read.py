"""The documents of a unit, whatever its format."""

from collections.abc import Iterator

from zaya_jax.data.readers.jsonl import read_jsonl
from zaya_jax.data.readers.megatron import read_megatron
from zaya_jax.data.readers.text import read_text
from zaya_jax.data.readers.unit import Entry, Unit


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
    match unit.format:  # pyarrow is imported only for what needs it
        case "text":
            return read_text(unit)
        case "jsonl":
            return read_jsonl(unit, field)
        case "parquet":
            from zaya_jax.data.readers.parquet import read_parquet

            return read_parquet(unit, field)
        case "arrow":
            from zaya_jax.data.readers.arrow import read_arrow

            return read_arrow(unit, field)
        case "megatron":
            return read_megatron(unit)
