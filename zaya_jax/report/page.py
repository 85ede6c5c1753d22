"""Render the page: one HTML file that loads nothing and runs no other script than its own."""

import base64
import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path

from plotly.offline import get_plotlyjs

from zaya_jax.report.page_plot import Plot
from zaya_jax.report.sections import make_sections
from zaya_jax.report.subject import Subject, Warn, make_or
from zaya_jax.report.tables import overview
from zaya_jax.run.page import render as render_page

MARK = "<!doctype html><!-- run report of zaya_jax -->"  # how a page starts, so that only pages are replaced
_FOLDER = Path(__file__).parent


def render(subjects: Sequence[Subject], config: str | None = None) -> str:
    """Return the page.

    Args:
      subjects: the runs, at least one.
      config: a configuration file that they are compared with.

    Raises:
      InputError: the configuration file is invalid.
    """
    sections = make_sections(subjects, config)
    plots = [block for section in sections for block in section.blocks if isinstance(block, Plot)]
    axes = [make_or({}, lambda subject: subject.axes, subject) for subject in subjects]
    data = {"figures": [plot.figure for plot in plots], "axes": axes}
    figures = json.dumps(data, allow_nan=False, separators=(",", ":"), default=list)
    scripts = [get_plotlyjs(), (_FOLDER / "page.js").read_text(encoding="utf-8")]
    return render_page(
        _FOLDER / "report.html.j2", mark=MARK, subjects=subjects, warnings=list(map(_warnings, subjects)),
        overview=overview(subjects), sections=sections, scripts=scripts,
        hashes=[_hash(script) for script in scripts], made=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        figures=figures.replace("<", "\\u003c"),
    )  # fmt: skip


def _warnings(subject: Subject) -> list[Warn]:
    unknown = Warn("failed", "The warnings about this run could not be made; a file of the run may be damaged.")
    return make_or([unknown], lambda subject: subject.warnings, subject)


def _hash(script: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
