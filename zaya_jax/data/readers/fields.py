"""Rules that select the field or column of documents, and decide which of its values are usable."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeGuard

from zaya_jax.data.readers.documents import Parsed
from zaya_jax.errors import InputError

LONGEST = 2**27  # bytes of a document; to encode one takes 100 times as much memory
CONVERSATIONS = ("messages", "conversations")  # common fields of conversations; the second is from ShareGPT
# Fields of a question → its answer, as texts: Alpaca's, whose question goes on in `input`, TRL's, and GSM8K's.
PAIRS = {"instruction": "output", "prompt": "completion", "question": "answer"}
TOOLS, SYSTEM = "tools", "system"  # fields next to a conversation that become part of it
# Fields next to a conversation that would change its meaning, and are refused; of the flags, if they are off.
SIBLINGS = re.compile(
    "functions|function_calls|available_tools|apis|tools_json|system_(prompt|message|instruction)|history|"
    "documents|images?|audios?|videos?|(loss_)?mask|chat_template_kwargs"
)
FLAGS = re.compile("weight|train|training|loss|label|loss_mask")
EMPTY = (None, "", [], {}, "[]", "{}", "null")
OFF = (*EMPTY, False)  # values of a key that is refused with any other; 0 equals False
_KINDS = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
_KINDS |= dict.fromkeys((int, float), "a number")


def is_document(value: object) -> TypeGuard[str | list[Any]]:
    """Return whether the value is a non-empty list, or a text that is not only white space."""
    return bool(value) and (isinstance(value, list) or (isinstance(value, str) and not value.isspace()))


def find_field(field: str, names: Collection[str]) -> str | None:
    """Return the field to read; in place of a missing `messages` it is `conversations`, or the first of a pair."""
    if field in names:
        return field
    others = [CONVERSATIONS[1], *(name for name, answer in PAIRS.items() if answer in names)]
    return next((name for name in others if name in names), None) if field == CONVERSATIONS[0] else None


def is_pair(field: str, name: str) -> bool:
    """Return whether `name`, which `find_field` returns for `field`, is the first field of a pair."""
    return field == CONVERSATIONS[0] and name in PAIRS


def suggest_chat(field: str, names: Collection[str]) -> str:
    """Return a hint to append to a missing-field message if the data looks like conversations, otherwise ''."""
    if field == CONVERSATIONS[0]:
        half = next((each for each in PAIRS if each in names), None)
        return f"; it has {half!r}, but no {PAIRS[half]!r}, which would be the answer" if half else ""
    name = find_field(CONVERSATIONS[0], names)
    return f"; it has {name!r}, and --chat reads conversations" if name else ""


def require_columns(file: str, field: str, names: Sequence[str], read: Iterable[str]) -> None:
    """Raise `InputError` unless a table whose columns are `names` has each of those that are read for `field` once."""
    for name in read:
        if (count := names.count(name)) != 1:
            problem, hint = ("several columns", "") if count else ("no column", suggest_chat(field, names))
            columns = ", ".join(map(repr, names)) or "none"
            raise InputError(f"The file {file} has {problem} {name!r}; its columns are {columns:.200}{hint}.")


def read_record(record: Mapping[str, Any], name: str, *, is_pair: bool) -> Parsed:
    """Return the text or conversation in the field `name` of a record, or in a pair of fields that `name` begins."""
    value, read = record[name], [name]
    if is_pair:
        texts = [name, *(["input"] if PAIRS.get(name) == "output" and not _is_blank(record.get("input")) else [])]
        read = [*texts, PAIRS[name]]
        for part in read:
            if not isinstance(record[part], str) and record[part] is not None:
                return Parsed(bad=("wrong type", f"{part!r} is {json_kind(record[part])}, but must be text"))
            if not is_document(record[part]):
                return Parsed(bad=rejection(record[part], part))
        question, answer = "\n\n".join(record[part] for part in texts), record[PAIRS[name]]
        value = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    elif not is_document(value):
        return Parsed(bad=rejection(value, name))
    if isinstance(value, str):
        return Parsed(value)
    beside = {key: content for key, content in record.items() if key not in read}
    bad, system = sibling_rejection(beside, name), beside.get(SYSTEM)
    if isinstance(system, str) and not _is_blank(system):
        if isinstance(value[0], dict) and SYSTEM in (value[0].get("role"), value[0].get("from")):
            bad = "unread field", f"{SYSTEM!r} next to {name!r} is text, but the conversation has a system message, too"
        value = [{"role": SYSTEM, "content": system}, *value]
    return Parsed(with_tools(value, beside.get(TOOLS)), bad, unread_keys(beside, name))


def _is_blank(value: object) -> bool:
    return value in EMPTY or (isinstance(value, str) and value.isspace())


def with_tools(messages: Any, tools: Any) -> Any:
    """Return a record of a conversation: the list of messages, or an object if there are tools."""
    return {"messages": messages, "tools": tools} if tools else messages


def sibling_rejection(beside: Mapping[str, Any], field: str) -> tuple[str, str] | None:
    """Return why a conversation with a field of `SIBLINGS` or `FLAGS` cannot be used; None if these are empty."""
    for name, value in beside.items():
        parts, empty = (value.values(), EMPTY) if isinstance(value, dict) else ([value], OFF)
        refused = SIBLINGS.fullmatch(name) or (name == SYSTEM and not isinstance(value, str))
        if name != field and refused and any(each not in empty for each in parts):
            return "unread field", f"{name!r} next to {field!r} is not read; put it into a system message, or remove it"
        flag = value.strip().lower() if isinstance(value, str) else value  # in CSV all values are text
        is_off = value is False or flag == "false" or (name in ("train", "training") and flag in ("0", "0.0"))
        is_off |= name == "weight" and flag not in (None, 1, "1", "1.0", "")
        if name != field and FLAGS.fullmatch(name) and is_off:
            return "unread field", f"{name!r} next to {field!r} is {value!r:.50}; leave out what is not trained"
    return None


def unread_keys(beside: Mapping[str, Any], field: str) -> tuple[str, ...]:
    """Return the keys next to a conversation that are neither empty, nor read, nor ask for what happens anyway."""
    read = (field, TOOLS, SYSTEM, "weight", "train", "training")
    return tuple(name for name, value in beside.items() if name not in read and value not in EMPTY)


def rejection(value: object, field: str) -> tuple[str, str]:
    """Return why a value, or the error of reading it, is no document: the reason, and a clause that names the field."""
    match value:
        case None:
            return "empty", f"{field!r} is null"
        case str():
            return "empty", f"{field!r} has {len(value)} characters, all of them white space"
        case list():
            return "empty", f"{field!r} is an empty list"
        case UnicodeDecodeError():
            return "not UTF-8", f"a byte of {field!r} cannot be decoded: {value.reason}"
        case MemoryError():
            return "too large", f"{field!r} has more than {LONGEST:,} bytes, or than memory"
        case Exception():  # a time that Python cannot represent
            return "wrong type", f"{field!r} contains a value that JSON cannot represent: {value}"
    return "wrong type", f"{field!r} is {json_kind(value)}, but must be text or a list"


def json_kind(value: object) -> str:
    """Name the type of a value in JSON's words, with an article."""
    return _KINDS.get(type(value), f"a {type(value).__name__}")
