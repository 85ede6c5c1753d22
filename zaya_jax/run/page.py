"""The frame that all HTML pages share: policy, style and tables. A page is one file that loads nothing."""

from pathlib import Path
from typing import Any

import jinja2


def render(template: Path, **values: Any) -> str:
    """Return a page from a Jinja template that extends `frame.html.j2`, and the values of its variables."""
    loader, strict = jinja2.FileSystemLoader([template.parent, Path(__file__).parent]), jinja2.StrictUndefined
    blocks = jinja2.Environment(autoescape=True, loader=loader, trim_blocks=True, lstrip_blocks=True, undefined=strict)
    return blocks.get_template(template.name).render(values)
