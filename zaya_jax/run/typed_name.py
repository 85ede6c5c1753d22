"""The name by which the user called a command, for its texts."""

import functools
import os
import re

TYPED = "ZAYA_TYPED"  # `zaya` runs `python -m zaya_jax.ROOM` in its place, and says so here


def typed_name(text: str) -> str:
    """Return `text`, which names commands as `python -m zaya_jax.ROOM`, with `zaya ROOM` if that was typed."""
    program = _program()
    text = text if program is None else text.replace("python -m zaya_jax.main", f"{program} train")
    return text if program is None else re.sub(r"python -m zaya_jax\.(\w+)", rf"{program} \1", text)


@functools.cache
def _program() -> str | None:
    """Return the name that was typed; removed from the environment, since nobody typed what this process starts."""
    return os.environ.pop(TYPED, None)
