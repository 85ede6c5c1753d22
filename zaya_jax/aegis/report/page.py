"""Render the page: one HTML file that loads nothing and runs no other script than its own."""

import base64
import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path

from plotly.offline import get_plotlyjs

from zaya_jax.aegis.report.page_plot import Plot
from zaya_jax.aegis.report.page_sections import make_sections
from zaya_jax.aegis.report.run_data import RunData, Warn, make_or
from zaya_jax.aegis.report.tables import overview
from zaya_jax.run.page import render as render_page

MARK = "<!doctype html><!-- run report of zaya_jax -->"  # how a page starts, so that only pages are replaced
_FOLDER = Path(__file__).parent


def render(runs: Sequence[RunData], config: str | None = None) -> str:
    """Return the page about at least one run; `InputError` if the file `config`, to compare with, is invalid."""
    sections = make_sections(runs, config)
    plots = [block for section in sections for block in section.blocks if isinstance(block, Plot)]
    axes = [make_or({}, lambda run: run.axes, run) for run in runs]
    data = {"figures": [plot.figure for plot in plots], "axes": axes}
    figures = json.dumps(data, allow_nan=False, separators=(",", ":"), default=list)
    scripts = [get_plotlyjs(), (_FOLDER / "page.js").read_text(encoding="utf-8")]
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    unknown = Warn("failed", "The warnings about this run could not be made; a file of the run may be damaged.")
    return render_page(
        _FOLDER / "report.html.j2",
        mark=MARK,
        runs=runs,
        warnings=[make_or([unknown], lambda run: run.warnings, run) for run in runs],
        overview=overview(runs),
        sections=sections,
        scripts=scripts,
        hashes=[f"sha256-{digest}" for digest in digests],
        made=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        figures=figures.replace("<", "\\u003c"),
    )
