"""Building blocks of the checks of all sections."""

import os
import reprlib
import unicodedata
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from zaya_jax.errors import InputError

_MAX_DIGITS = 40


class _YamlRepr(reprlib.Repr):
    """The text of values in messages: YAML's words for constants, and never more than a line."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother = 3, 120, 120

    def repr_str(self, x: str, level: int) -> str:
        return repr(x if len(x) <= self.maxstring else f"{x[: self.maxstring - 40]}...{x[-20:]}")

    def repr_NoneType(self, x: None, level: int) -> str:
        return "null"

    def repr_bool(self, x: bool, level: int) -> str:
        return "true" if x else "false"

    def repr_int(self, x: int, level: int) -> str:
        bits = x.bit_length()  # Python refuses to write out an integer of more than 4,300 digits
        return str(x) if bits <= 3 * _MAX_DIGITS else f"{'-' if x < 0 else ''}2**{bits - 1} or more"

    def repr_float(self, x: float, level: int) -> str:
        return {"inf": ".inf", "-inf": "-.inf", "nan": ".nan"}.get(repr(x), repr(x))

    def repr_date(self, x: object, level: int) -> str:
        return str(x)

    repr_datetime = repr_date


shown = _YamlRepr().repr  # a value as messages show it


def require(condition: bool, key: str, value: object, allowed: str) -> None:
    """Raise `InputError` naming `key`, its `value` and what is `allowed`, unless `condition` holds."""
    if not condition:
        raise InputError(f"{key} is {shown(value)}, but must be {allowed}.")


def require_path(key: str, text: str) -> None:
    """Raise `InputError` unless `text` can be a path here.

    Refused are a name that is too long, the home folder of an unknown user, and characters that no log shows as they
    are: control characters, line separators and lone surrogates.
    """
    invisible = next((c for c in text if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp")), None)
    if invisible is not None:
        raise InputError(f"{key} is {shown(text)}, which cannot be a path: it contains U+{ord(invisible):04X}.")
    try:
        os.lstat(Path(text).expanduser())
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error).removesuffix(".")
        raise InputError(f"{key} is {shown(text)}, which cannot be a path: {reason}.") from error


def is_name(text: object) -> bool:
    """Whether `text` can name a phase or a source: letters, digits, _ and -, the first not a digit; not long."""
    return isinstance(text, str) and len(text) <= 200 and text.replace("-", "_").isidentifier()


def item_keys(where: str, names: Sequence[object]) -> list[str]:
    """The key of each item of the list `where`: by its name where no other item has it, else by its index."""
    counts = Counter(name for name in names if isinstance(name, str))
    return [f"{where}.{name if is_name(name) and counts[str(name)] == 1 else index}"
            for index, name in enumerate(names)]  # fmt: skip
