"""The name by which the user called a command, for its texts."""

import functools
import os
import re

# `zaya` runs `python -m zaya_jax.ROOM` in its place, and says so here; `zaya doctor`, a verb of a room, with its name.
TYPED = "ZAYA_TYPED"


def typed_name(text: str) -> str:
    """Return `text`, which names commands as `python -m zaya_jax.ROOM`, with `zaya ROOM` if that was typed."""
    if (typed := _typed()) is None:
        return text
    program = typed.removesuffix(" doctor")
    text = text.replace("python -m zaya_jax.main", f"{program} train")
    text = re.sub(r"python -m zaya_jax\.(\w+)", rf"{program} \1", text)
    return text if typed == program else text.replace(f"{program} machine doctor", typed)


@functools.cache
def _typed() -> str | None:
    """Return the name that was typed; removed from the environment, since nobody typed what this process starts."""
    return os.environ.pop(TYPED, None)
