"""The header of every benchmark result: command, versions and hardware; and how results are written."""

import importlib.util
import json
import os
import platform
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from zaya_jax.errors import InputError, printable
from zaya_jax.hardware.detection import cpu_name
from zaya_jax.run.files import require_regular, write_atomically
from zaya_jax.run.table import Table, format_table
from zaya_jax.run.versions import package_version
from zaya_jax.run.writing import resolved


def require_packages(extra: str, *names: str) -> None:
    """Raise `InputError` if a package of an extra is not installed; none is imported."""
    if missing := [name for name in names if importlib.util.find_spec(name) is None]:
        raise InputError(f"The comparison needs {' and '.join(missing)}: pip install -e '.[{extra}]'.")


def describe_run(benchmark: str, size: str, peer: str, packages: Iterable[str]) -> dict[str, Any]:
    """Make the header of a result, with the versions of this project, jax, jaxlib and `packages`."""
    packages = ("zaya-jax", "jax", "jaxlib", *packages)
    versions = {name: package_version(name) or "not installed" for name in packages}
    result: dict[str, Any] = {"benchmark": benchmark, "size": size}
    result |= {"command": shlex.join(["python", *sys.orig_argv[1:]]), "peer": peer}
    result["versions"] = {"python": platform.python_version(), **versions}
    hardware = {"machine": platform.machine(), "cpu": cpu_name(), "cpus": len(os.sched_getaffinity(0))}
    return result | {"hardware": hardware}


def write_result(result: dict[str, Any], output: str | None) -> None:
    """Write `result` as JSON to the file `output`, if it is not None."""
    if output:
        require_regular(Path(output))
        write_atomically(resolved(Path(output)), json.dumps(result, indent=2) + "\n")


def table_lines(table: Table) -> list[str]:
    """Return a table as lines of text, texts to the left and numbers to the right; [] without rows."""
    if not table.rows:
        return []
    lines = format_table([table.columns, *table.rows], table.numeric)
    return [printable(line) for line in (table.title, *lines, *table.remarks)]


def print_tables(tables: Iterable[Table]) -> None:
    """Print tables, without empty ones."""
    print("\n\n".join("\n".join(lines) for table in tables if (lines := table_lines(table))), flush=True)


def print_once(*lines: str) -> None:
    """Print lines in the first process of the job."""
    from zaya_jax.job.multihost import is_primary

    if is_primary():
        print("\n".join(lines), flush=True)


def rounded(seconds: Iterable[float]) -> list[float]:
    """Round seconds to 0.1 ms."""
    return [round(second, 4) for second in seconds]
