"""What the checks of all sections are made of."""

import os
from pathlib import Path

from zaya_jax.errors import InputError


def require(condition: bool, key: str, value: object, allowed: str) -> None:
    """Raise `InputError` naming `key`, its `value` and what is `allowed`, unless `condition` holds."""
    if not condition:
        raise InputError(f"{key} is {value!r}, but must be {allowed}.")


def require_positive(section: str, config: object, *names: str) -> None:
    """Raise `InputError` unless the fields `names` of a section are all greater than zero."""
    for name in names:
        value = getattr(config, name)
        require(value > 0, f"{section}.{name}", value, "greater than zero")


def require_path(key: str, text: str) -> None:
    """Refuse what can be no path here: a NUL byte, a name too long, the home of a user that is not there."""
    try:
        os.lstat(Path(text).expanduser())
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(f"{key} is {text!r}, which can be no path: {error}.") from error
