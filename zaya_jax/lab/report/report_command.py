"""The verb `report` of `python -m zaya_jax.machine`."""

import argparse
from pathlib import Path
from typing import Any

from zaya_jax.config.checks import require
from zaya_jax.errors import InputError, printable
from zaya_jax.lab.result import check_request
from zaya_jax.lab.verbs import add_verb


def add(verbs: Any, program: str) -> None:
    """Add the verb to the parser of `program`."""
    verb = add_verb(verbs, program, _run)
    verb.add_argument("folder", metavar="FOLDER", help="folder with results as JSON")
    # `--output` of other verbs is a JSON file, which `run_verb` writes.
    verb.add_argument("--output", dest="page", metavar="FILE", help="HTML file (default: FOLDER/report.html)")


def _run(parsed: argparse.Namespace) -> dict[str, Any]:
    """Write the results in a folder as one HTML page.

    The page has the tables and plots of all results that the other verbs wrote with --output, and needs no network.

    report results --output machine.html
    """
    folder = Path(parsed.folder)
    require(folder.is_dir(), "FOLDER", parsed.folder, "a folder with results of python -m zaya_jax.machine")
    page = folder / "report.html" if parsed.page is None else Path(parsed.page)
    check_request(1, {"--output": str(page)})
    if page.suffix != ".html":
        raise InputError(f"--output is {parsed.page!r}, but must end in .html.")
    from zaya_jax.lab.report.page import render
    from zaya_jax.lab.report.results import read_results
    from zaya_jax.run.files import write_atomically
    from zaya_jax.run.writing import resolved

    results, ignored = read_results(folder)
    write_atomically(resolved(page), render(results, ignored))
    if ignored:
        print(f"Ignored, since the report has no section for them: {', '.join(ignored)}.")
    print(printable(f"The report is in {page}. Results: {', '.join(result.file for result in results)}."))
    return {}
