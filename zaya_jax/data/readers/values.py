"""Which values of a field or a column are documents."""

from typing import Any, TypeGuard

from zaya_jax.data.readers.unit import Reason


def is_document(value: object) -> TypeGuard[str | list[Any]]:
    """Whether the value is a list with something in it, or a text that is not only white space."""
    return (isinstance(value, str) and bool(value) and not value.isspace()) or (isinstance(value, list) and bool(value))


def refuse(value: object, field: str) -> tuple[Reason, str]:
    """Why a value that is no document is none: the reason, and a clause that names the field."""
    match value:
        case None:
            return "empty", f"{field!r} is null"
        case str():
            return "empty", f"{field!r} is a text of {len(value)} characters, none of them more than white space"
        case list():
            return "empty", f"{field!r} is an empty list"
    return "wrong type", f"{field!r} is of type {type(value).__name__}, where a text or a list is allowed"
