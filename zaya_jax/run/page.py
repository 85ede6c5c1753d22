"""The frame that all HTML pages share: policy, style and tables. A page is one file that loads nothing."""

from pathlib import Path
from typing import Any

import jinja2


def render(template: Path, **values: Any) -> str:
    """Return a page.

    Args:
      template: a Jinja template that extends `frame.html.j2`.
      **values: its variables.
    """
    environment = jinja2.Environment(
        autoescape=True, loader=jinja2.FileSystemLoader([template.parent, Path(__file__).parent]), trim_blocks=True,
        lstrip_blocks=True, undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    return environment.get_template(template.name).render(values)
