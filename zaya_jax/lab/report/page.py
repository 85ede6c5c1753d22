"""Write results as a page that loads nothing."""

import base64
import tempfile
from pathlib import Path
from typing import Any

from zaya_jax.errors import InputError
from zaya_jax.lab.report.results import Result, describe_hardware, differences, notes, read_results
from zaya_jax.lab.report.tables import TABLES
from zaya_jax.lab.result_plots import draw
from zaya_jax.run.files import write_atomically
from zaya_jax.run.page import render
from zaya_jax.run.writing import resolved

_TEMPLATE = Path(__file__).parent / "machine.html.j2"


def write_page(folder: Path, page: Path) -> tuple[list[str], list[str]]:
    """Write the page of the results in `folder`; returns the names of their files, and of files that are no results.

    Raises:
      InputError: there is no result, or one lacks what its verb writes.
    """
    results, ignored = read_results(folder)
    sections, hardware = [], {}
    for result in results:
        try:
            hardware[result.file] = describe_hardware(result)
            sections.append(_section(result))
        except (KeyError, IndexError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
            what = f"{result.file} is a damaged result of machine {result.verb}, or one of another version"
            raise InputError(f"{what} ({error!r}): write it again.") from error
    name, warning = differences(hardware)
    text = render(_TEMPLATE, name=name, warning=warning, sections=sections, ignored=ignored)
    write_atomically(resolved(page), text)
    return list(hardware), ignored


def _section(result: Result) -> dict[str, Any]:
    """Return what the template shows: `facts` by name, `tables` without empty ones, and the `picture` of `_picture`."""
    content, facts = result.content, {"command": result.command}
    named = {"date": "date", "size": "size", "compared with": "peer"}
    facts |= {label: content[key] for label, key in named.items() if content.get(key)}
    if versions := content.get("versions"):
        facts["versions"] = ", ".join(f"{name} {version}" for name, version in versions.items())
    if processor := describe_hardware(result)[1]:
        hardware = content["hardware"]
        facts["hardware"] = ", ".join(filter(None, (hardware.get("device"), processor, hardware["machine"])))
    tables = [table for table in TABLES[result.verb](content) if table.rows]
    return {"result": result, "facts": facts, "notes": notes(result), "tables": tables, "picture": _picture(result)}


def _picture(result: Result) -> tuple[str, str]:
    """Return the plot as a data URI, and what it shows; two empty texts without a plot."""
    with tempfile.TemporaryDirectory(prefix="zaya_jax_") as folder:
        path = Path(folder) / "plot.png"
        shows = draw(result.verb, path, result.content)
        if not path.exists():
            return "", ""
        return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}", shows
