"""A column of a table as documents: what Parquet and Arrow files share."""

from collections.abc import Iterator

import pyarrow as pa

from zaya_jax.data.readers.unit import Bad, Document, FirstLine, part
from zaya_jax.data.readers.values import BESIDE, find_field, is_document, refuse, refuse_beside, suggest_chat
from zaya_jax.errors import InputError

_ROWS_AT_ONCE = 64  # as Python objects; a row may hold megabytes


def check_columns(file: str, schema: pa.Schema, field: str) -> list[str]:
    """The columns to read: the one of the field and, where it holds lists, those of `BESIDE`.

    Raises:
      InputError: there is not exactly one column of the name, or it can hold neither text nor lists.
    """
    columns = ", ".join(map(repr, schema.names))
    index = schema.get_field_index(find_field(field, schema.names) or field)
    if index < 0:
        problem = "several columns" if field in schema.names else "no column"
        raise InputError(f"The file {file} has {problem} {field!r}; its columns are {columns or 'none'}"
                         f"{suggest_chat(field, schema.names)}.")  # fmt: skip
    kind = schema.field(index).type
    if not _can_hold_documents(kind):
        raise InputError(
            f"The column {field!r} of the file {file} is of type {kind}, where text and lists are allowed; "
            f"its columns are {columns}."
        )
    beside = [name for name in BESIDE if schema.names.count(name) == 1] if _holds_lists(kind) else []
    return [schema.names[index], *beside]


def column_documents(
    batch: pa.RecordBatch, *, file: str, columns: list[str], size: int, nth: int, first: FirstLine
) -> Iterator[Document | Bad]:
    """The rows of a batch; lists of structs become lists of dicts.

    Args:
      batch: some rows of the columns.
      file: its path.
      columns: names, see `check_columns`.
      size: bytes of input that the batch stands for.
      nth: rows of the unit before the batch.
      first: the unit's first row.
    """
    array, (field, *others) = batch.column(columns[0]), columns
    beside = {name: batch.column(name) for name in others}
    for start in range(0, len(array), _ROWS_AT_ONCE):
        rows = array.slice(start, _ROWS_AT_ONCE)
        try:
            values = rows.to_pylist()
        except (ValueError, OverflowError):  # now to find out which
            values = [_value(row) for row in rows]
        for i, value in enumerate(values, start):
            lost = refuse_beside({name: _value(other[i]) for name, other in beside.items()}, field) if beside else None
            if lost:
                yield Bad(file, first.number + nth + i, *lost)
            elif is_document(value):
                yield Document(value, file, part(size, len(array), i, i + 1), nth + i, first)
            elif isinstance(value, UnicodeDecodeError):
                detail = f"a byte of {field!r} cannot be decoded: {value.reason}"
                yield Bad(file, first.number + nth + i, "not UTF-8", detail)
            elif isinstance(value, Exception):  # a time that Python has no type for
                yield Bad(file, first.number + nth + i, "wrong type", f"{field!r} holds what JSON cannot: {value}")
            else:
                yield Bad(file, first.number + nth + i, *refuse(value, field))


def _value(row: pa.Scalar) -> object:
    try:
        return row.as_py()
    except (ValueError, OverflowError) as error:
        return error


def _can_hold_documents(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return _can_hold_documents(kind.value_type)
    texts = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    return _holds_lists(kind) or any(is_kind(kind) for is_kind in (*texts, pa.types.is_null))


def _holds_lists(kind: pa.DataType) -> bool:
    lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list,
             pa.types.is_list_view, pa.types.is_large_list_view)  # fmt: skip
    return any(is_kind(kind) for is_kind in lists)
