"""Rules for fields and columns: which one holds documents, and which of its values are usable."""

from collections.abc import Collection, Mapping
from typing import Any, TypeGuard

from zaya_jax.data.readers.unit import Reason


def is_document(value: object) -> TypeGuard[str | list[Any]]:
    """Whether the value is a list with something in it, or a text that is not only white space."""
    return (isinstance(value, str) and bool(value) and not value.isspace()) or (isinstance(value, list) and bool(value))


CONVERSATIONS = ("messages", "conversations")  # fields that hold them, the second in the form of ShareGPT
SIBLINGS = ("tools", "functions", "system")  # fields beside a conversation that change what it means


def find_field(field: str, names: Collection[str]) -> str | None:
    """The field to read where there are these: the one asked for, or the other name of conversations."""
    if field in names:
        return field
    return CONVERSATIONS[1] if field == CONVERSATIONS[0] and CONVERSATIONS[1] in names else None


def suggest_chat(field: str, names: Collection[str]) -> str:
    """What to add to the message that there is no such field; nothing, or how to read the conversations there are."""
    others = [name for name in CONVERSATIONS if name in names and name != field]
    return f"; it has {others[0]!r}, and --chat reads conversations" if others else ""


def sibling_rejection(beside: Mapping[str, Any], field: str) -> tuple[Reason, str] | None:
    """Why a conversation with a value in a field of `SIBLINGS` cannot be used; None where all are empty."""
    for name in SIBLINGS:
        if beside.get(name) and beside[name] not in ("[]", "{}", "null"):
            return "lost field", f"{name!r} next to {field!r} is not read; put it into a system message, or remove it"
    return None


def rejection(value: object, field: str) -> tuple[Reason, str]:
    """Why a value cannot be used as a document: the reason, and a clause that names the field."""
    match value:
        case None:
            return "empty", f"{field!r} is null"
        case str():
            return "empty", f"{field!r} has {len(value)} characters, all of them white space"
        case list():
            return "empty", f"{field!r} is an empty list"
    return "wrong type", f"{field!r} has type {type(value).__name__}, but must be text or a list"
