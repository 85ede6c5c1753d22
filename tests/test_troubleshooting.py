"""docs/troubleshooting.md quotes messages that the source has: each part around a `…` occurs in one text, in order."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
QUOTES = re.findall(r"^\| `([^`]+)` \|", PAGE, re.MULTILINE)  # the first column of each table


def texts(tree: ast.AST) -> Iterator[str]:
    """The texts of a module, each value of an f-string as …."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@functools.cache
def source_texts() -> list[str]:
    return [
        text
        for path in sorted((ROOT / "zaya_jax").rglob("*.py"))
        for text in texts(ast.parse(path.read_text(encoding="utf-8")))
    ]


@pytest.mark.parametrize("quote", QUOTES)
def test_the_source_has_the_message(quote: str):
    parts = [part.strip() for part in quote.split("…") if part.strip()]
    assert parts, quote
    pattern = re.compile(".*".join(map(re.escape, parts)), re.DOTALL)
    assert any(pattern.search(text) for text in source_texts()), quote


def test_there_are_about_forty():
    assert len(set(QUOTES)) == len(QUOTES) >= 40
