"""Replaces comments such as `<!-- generated: configuration -->` in pages by what is generated from the code."""

import re
from collections.abc import Callable
from typing import Any

from docs._ext import api, configuration, results

MARK = re.compile(r"^<!-- generated: (\w+) ?(\S*) -->$", re.MULTILINE)
PARTS: dict[str, Callable[..., str]] = {
    "api": api.module_pages,
    "configuration": configuration.reference,
    "exports": api.front_door,
    "results": results.results,
}


def fill(text: str) -> str:
    """Return the Markdown of a page with its generated parts."""
    return MARK.sub(lambda mark: PARTS[mark[1]](*filter(None, [mark[2]])), text)


def setup(app: Any) -> dict[str, bool]:
    """Connect the events of Sphinx."""
    app.connect("source-read", lambda app, name, source: source.__setitem__(0, fill(source[0])))
    app.connect("autodoc-process-docstring", api.to_rst, priority=100)  # before napoleon
    app.connect("autodoc-skip-member", api.skip_field)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
