"""Shared helpers for validating configuration values."""

import os
import reprlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import islice

from zaya_jax.errors import InputError

NAME = "a name of at most 200 letters, digits, _ and -"  # what `is_name` accepts
_MAX_DIGITS = 40
_MAX_KINDS = 8


class _YamlRepr(reprlib.Repr):
    """Formats values for messages: constants in YAML's words, at most one line."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother = 3, 120, 120

    def repr_str(self, x: str, level: int) -> str:
        return repr(x if len(x) <= self.maxstring else f"{x[: self.maxstring - 40]}...{x[-20:]}")

    def repr_NoneType(self, x: None, level: int) -> str:
        return "null"

    def repr_bool(self, x: bool, level: int) -> str:
        return "true" if x else "false"

    def repr_dict(self, x: dict[object, object], level: int) -> str:
        if level <= 0:
            return "{...}"
        items = [f"{key!s:.40}: {self.repr1(x[key], level - 1)}" for key in islice(x, self.maxdict)]
        return "{" + ", ".join([*items, *["..."] * (len(x) > self.maxdict)]) + "}"

    def repr_int(self, x: int, level: int) -> str:
        bits = x.bit_length()  # Python refuses to print an integer of more than 4,300 digits
        return str(x) if bits <= 3 * _MAX_DIGITS else f"{'-' if x < 0 else ''}2**{bits - 1} or more"

    def repr_tuple(self, x: tuple[object, ...], level: int) -> str:
        return self.repr_list(list(x), level)

    def repr_float(self, x: float, level: int) -> str:
        return {"inf": ".inf", "-inf": "-.inf", "nan": ".nan"}.get(repr(x), repr(x))

    def repr_date(self, x: object, level: int) -> str:
        return str(x)

    repr_datetime = repr_date


shown = _YamlRepr().repr  # formats a value for a message


def require(condition: bool, key: str, value: object, allowed: str) -> None:
    """Raise `InputError` naming `key`, its `value` and what is `allowed`, unless `condition` holds."""
    if not condition:
        raise InputError(f"{key} is {shown(value)}, but must be {allowed}.")


def field_check(section: object, key: str) -> Callable[[str, bool, str], None]:
    """Return `must(name, condition, allowed)`: `require` about the field `name` of a section whose key is `key`."""

    def must(name: str, condition: bool, allowed: str) -> None:
        require(condition, f"{key}.{name}" if key else name, getattr(section, name), allowed)

    return must


def require_path(key: str, text: str | None, nonempty: str = "") -> None:
    """Raise `InputError` if the file system refuses a path, as with a NUL, or if it is empty but must be `nonempty`."""
    if text is None:
        return
    require(text != "" or not nonempty, key, text, nonempty)
    try:
        os.lstat(os.path.expanduser(text))
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error).removesuffix(".")
        raise InputError(f"{key} is {shown(text)}, which is not a valid path: {reason}.") from error


def counted(count: int, noun: str, ending: str = "s") -> str:
    """Format a count with its noun, such as '1 shard' or '1,024 shards'; `ending` forms the plural."""
    return f"{count:,} {noun}{'' if count == 1 else ending}"


def list_counts(counts: Mapping[str, int]) -> str:
    """Format the number of each kind, the most frequent first, such as '12 .md, 1 hidden'; rare kinds are summed up."""
    kinds = sorted(counts.items(), key=lambda kind: -kind[1])
    kinds[_MAX_KINDS:] = [("of other kinds", sum(count for _, count in kinds[_MAX_KINDS:]))]
    return ", ".join(f"{count:,} {kind}" for kind, count in kinds if count)


def is_name(text: object) -> bool:
    """Return whether `text` is a valid phase or source name: `NAME`, without a leading digit."""
    return isinstance(text, str) and len(text) <= 200 and text.replace("-", "_").isidentifier()


def item_keys(list_key: str, names: Sequence[object]) -> list[str]:
    """Return the key of each item of the list `list_key`: its name if that is unique, else its index."""
    counts = Counter(name for name in names if isinstance(name, str))
    keys = (name if is_name(name) and counts[str(name)] == 1 else index for index, name in enumerate(names))
    return [f"{list_key}.{key}" for key in keys]
