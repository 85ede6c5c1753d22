"""A small configuration that can be, and what is said of changes to it."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from tests.helpers import TINY
from zaya_jax.config import Config, DataConfig, PhaseConfig, SourceConfig, Table, load_config
from zaya_jax.errors import InputError

SMALL = Config(TINY, (PhaseConfig(tokens=10 * 8192),), data=DataConfig(context=32))
SOURCES = Table({"web": SourceConfig("web"), "code": SourceConfig("code", 1.5)})
NO_PATHS = ["a\0b", "x" * 5000, "\ud800"]


def changed(config: Any, changes: dict[str, Any]) -> Any:
    """`config` with fields `a.b` set."""
    for key, value in changes.items():
        first, _, rest = key.partition(".")
        new = changed(getattr(config, first), {rest: value}) if rest else value
        config = dataclasses.replace(config, **{first: new})
    return config


def refused(changes: dict[str, Any], config: Config = SMALL) -> str:
    """The sentence that `config` with the changes is refused with."""
    with pytest.raises(InputError) as caught:
        changed(config, changes).check()
    return str(caught.value)


@st.composite
def row_ranges(draw: st.DrawFn, end: int = 200) -> tuple[tuple[int, int], ...]:
    """Ranges of rows below `end`, of which some touch."""
    edges = sorted(draw(st.lists(st.integers(0, end), max_size=8)))
    return tuple((first, last) for first, last in zip(edges[::2], edges[1::2], strict=False) if first < last)


def written(folder: Path, text: str, name: str = "run.yaml") -> Path:
    """A file of `text`."""
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def refused_to_load(path: Path, *overrides: str) -> str:
    """The one sentence that the file, with the overrides, is refused with."""
    with pytest.raises(InputError) as caught:
        load_config(path, overrides)
    message = str(caught.value)
    assert message.endswith((".", "?")), "a full sentence"
    assert "\n" not in message
    return message
