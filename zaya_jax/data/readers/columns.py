"""Turn a column of a table into documents, for Parquet and Arrow files."""

import functools
import re
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from zaya_jax.data.readers import values
from zaya_jax.data.readers.tool_calls import with_tools
from zaya_jax.data.readers.unit import BadDocument, Document, Entry, FirstLine, even_share
from zaya_jax.errors import InputError

# Types of which a few bytes can stand for many values.
_SHARED = re.compile(r"dictionary|view|run_end|(?<!not )null|struct<>|\[0\]")


def check_columns(file: str, schema: pa.Schema, field: str) -> list[str]:
    """Return the columns to read: that of the field and, if it has lists, all others, which may change what they mean.

    Raises:
      InputError: not exactly one column has the name, or its type is neither text nor lists.
    """
    columns = ", ".join(map(repr, schema.names))
    index = schema.get_field_index(values.find_field(field, schema.names) or field)
    if index < 0:
        problem = "several columns" if field in schema.names else "no column"
        raise InputError(f"The file {file} has {problem} {field!r}; its columns are {columns or 'none'}"
                         f"{values.suggest_chat(field, schema.names)}.")  # fmt: skip
    kind = schema.field(index).type
    if not _can_hold_documents(kind):
        raise InputError(
            f"The column {field!r} of the file {file} has type {kind}, but must have text or lists; "
            f"its columns are {columns}."
        )
    name = schema.names[index]
    beside = schema.names if _holds_lists(kind) else ()
    return [name, *(other for other in beside if other != name and schema.names.count(other) == 1)]


def column_documents(
    batch: pa.RecordBatch, *, file: str, columns: list[str], size: int, before: int, first: FirstLine
) -> Iterator[Entry]:
    """Yield the rows of a batch as documents. Lists of structs become lists of dicts.

    Args:
      batch: a record batch with at least the `columns`.
      file: path, for messages.
      columns: from `check_columns`.
      size: bytes of input that the batch stands for, for progress.
      before: number of rows of the unit before the batch.
      first: row number of the unit's first row.
    """
    array, (field, *names) = batch.column(columns[0]), columns
    beside = {name: batch.column(name) for name in names}
    is_small = array.nbytes <= values.LONGEST and not _SHARED.search(str(array.type))
    for i, row in enumerate(array):  # one at a time: in a dictionary, a few bytes can stand for many megabytes
        value, others = _value(row, is_small), {name: _value(other[i]) for name, other in beside.items()}
        bad = values.sibling_rejection(others, field) if others else None
        if bad is None and values.is_document(value):
            whole = with_tools(value, others.get(values.TOOLS))
            yield Document(whole, file, even_share(size, len(array), i, i + 1), before + i, first,
                           values.unread_keys(others, field) if others else ())  # fmt: skip
            continue
        if isinstance(value, UnicodeDecodeError):
            bad = bad or ("not UTF-8", f"a byte of {field!r} cannot be decoded: {value.reason}")
        elif isinstance(value, MemoryError):
            bad = bad or ("too large", f"{field!r} has more than {values.LONGEST:,} bytes, or than memory")
        elif isinstance(value, Exception):  # a time that Python cannot represent
            bad = bad or ("wrong type", f"{field!r} contains a value that JSON cannot represent: {value}")
        yield BadDocument(file, first.number + before + i, *(bad or values.rejection(value, field)))


def _value(row: pa.Scalar, is_small: bool = False) -> object:
    if isinstance(row, pa.BinaryScalar) and not isinstance(row, pa.StringScalar):  # an image: counted, not read
        return True if row.is_valid else None
    try:
        _ = is_small or _subtract(values.LONGEST, row)
        return row.as_py()
    except (ValueError, OverflowError, MemoryError) as error:
        return error


def _subtract(left: int, value: Any) -> int:
    """Return `left` less the bytes that a value has once converted. Raise `MemoryError` as soon as that is negative."""
    value = value.value if isinstance(value, pa.DictionaryScalar) else value
    left -= 8 + (value.as_buffer().size if isinstance(value, pa.BinaryScalar) and value.is_valid else 0)
    parts = value.values if isinstance(value, pa.ListScalar) else ()
    if parts and pa.types.is_primitive(parts.type):  # numbers, such as an embedding's
        left, parts = left - 8 * len(parts), ()
    if left < 0:
        raise MemoryError
    if isinstance(value, pa.StructScalar) and value.is_valid:
        parts = (value[i] for i in range(len(value)))
    return functools.reduce(_subtract, parts or (), left)


def _can_hold_documents(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return _can_hold_documents(kind.value_type)
    texts = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    return _holds_lists(kind) or any(is_kind(kind) for is_kind in (*texts, pa.types.is_null))


def _holds_lists(kind: pa.DataType) -> bool:
    lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list,
             pa.types.is_list_view, pa.types.is_large_list_view)  # fmt: skip
    return any(is_kind(kind) for is_kind in lists)
