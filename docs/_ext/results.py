"""The pages of results, from the JSON files of `benchmarks/` and the figures beside them."""

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
GROUPS = {  # beginnings of the names of each group's files; the last group takes the rest
    "predictions": ("gpu_", "gpu/", "compiled_", "kernels_compiled"),
    "faults": ("soak_", "aegis_", "supervision"),
    "machine": ("machine_cpu/",),
    "benchmarks": ("",),
}
MAX_ROWS, MAX_COLUMNS = 10, 6
_FIRST = ("case", "ratio")  # columns
_DETAILS = {"size": "size", "command": "command", "commands": "command", "peer": "compared with", "note": "note"}


def files(group: str) -> list[Path]:
    """Return the files of results in a group."""
    named = {path: path.relative_to(BENCHMARKS).as_posix() for path in sorted(BENCHMARKS.rglob("*.json"))}
    first = {path: next(key for key, starts in GROUPS.items() if name.startswith(starts))
             for path, name in named.items()}  # fmt: skip
    return [path for path, key in first.items() if key == group]


def results(group: str) -> str:
    """Return the Markdown of the results of a group."""
    return "\n".join(line for path in files(group) for line in _section(path))


def _section(path: Path) -> Iterator[str]:
    name, tree = path.relative_to(BENCHMARKS).as_posix(), json.loads(path.read_text(encoding="utf-8"))
    tree = tree if isinstance(tree, dict) else {"results": tree}
    yield from (f"## `{name}`", "")
    what = tree.get("what") or tree.get("benchmark")
    if what:
        yield from (f"{what[0].upper()}{what[1:].rstrip('.')}.", "")
    details = [(label, tree[key]) for key, label in _DETAILS.items() if tree.get(key)]
    details = [(label, f"`{value[0] if isinstance(value, list) else value}`" if label == "command" else str(value))
             for label, value in details]  # fmt: skip
    if "hardware" in tree:
        details.append(("hardware", _hardware(tree["hardware"])))
    if "versions" in tree:
        details.append(("versions", ", ".join(f"{library} {version}" for library, version in tree["versions"].items())))
    details.append(("data", f"[{name}](../benchmarks/{name})"))
    yield from _table([" ", " "], [[label, _cell(text)] for label, text in details])
    yield from _table(*_rows(tree))
    if path.with_suffix(".png").exists():
        yield from (f"![{what or name}](../benchmarks/{name.removesuffix('.json')}.png)", "")


def _hardware(parts: Any) -> str:
    if not isinstance(parts, dict):
        return str(parts)
    cores = [f"{parts['cpus']} cores"] if "cpus" in parts else []
    memory = [f"{_value('bytes', parts['memory_bytes'])} of memory"] if "memory_bytes" in parts else []
    named = [parts[key] for key in ("cpu", "device", "load", "note") if isinstance(parts.get(key), str)]
    return ", ".join([*named[:1], *cores, *memory, *named[1:]])


def _rows(tree: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the column names and rows of the results: of `results` if it is a collection, else of the other keys."""
    cases = tree.get("results")
    if isinstance(cases, dict) and cases and all(isinstance(value, dict) for value in cases.values()):
        cases = [{"case": name, **value} for name, value in cases.items()]
    if isinstance(cases, list) and cases and all(isinstance(row, dict) for row in cases):
        return _rows_of_cases([dict(_scalars(row)) for row in cases])
    skipped = {"what", "benchmark", "hardware", "versions", *_DETAILS}
    rest = {**(cases if isinstance(cases, dict) else {}), **tree}
    rest.pop("results", None)
    flat = [
        (name, value) for key, value in rest.items() if key not in skipped for name, value in _scalars({key: value})
    ]
    return ["result", "value"], [[name, _value(name, value)] for name, value in flat[:MAX_ROWS]]


def _rows_of_cases(cases: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return column names and rows: columns that differ between cases, and cases spread over the file."""
    names = list(dict.fromkeys(name for case in cases for name in case))
    place = {_without_side(name): index for index, name in reversed(list(enumerate(names)))}
    names.sort(key=lambda name: (name not in _FIRST, place[_without_side(name)]))  # `after x` follows `before x`
    if len(cases) <= MAX_COLUMNS // 2 < len(names) // 2:  # few cases with many values: transposed
        rows = [[name, *(_value(name, case.get(name, "")) for case in cases)] for name in names[1:][:MAX_ROWS]]
        return [names[0], *(str(case.get(names[0], "")) for case in cases)], rows
    if len(cases) > MAX_COLUMNS // 2:
        names = [name for name in names if len({str(case.get(name)) for case in cases}) > 1]
    names = names[:MAX_COLUMNS]
    chosen = cases[:: -(-len(cases) // MAX_ROWS)]
    rows = [[_value(name, case.get(name, "")) for name in names] for case in chosen]
    if len(chosen) < len(cases):
        rows.append([f"{len(chosen)} of {len(cases)} rows", *[" "] * (len(names) - 1)])
    return names, rows


def _without_side(name: str) -> str:
    return name.removeprefix("before ").removeprefix("after ")


def _scalars(row: dict[str, Any], prefix: str = "", depth: int = 2) -> Iterator[tuple[str, Any]]:
    """Yield the numbers and texts of a row, and medians of lists of numbers, such as times."""
    for key, value in row.items():
        name = key.replace("_", " ")
        if isinstance(value, dict) and depth:
            yield from _scalars(value, f"{prefix}{name} ", depth - 1)
        elif isinstance(value, list) and value and all(type(item) in (int, float) for item in value):
            yield f"{prefix}{name}" + (f" (median of {len(value)})" if len(value) > 1 else ""), statistics.median(value)
        elif isinstance(value, (str, int, float)):
            yield f"{prefix}{name}", value


def _value(name: str, value: Any) -> str:
    """Format a number with three significant digits, counts in full, and large numbers of bytes in GB."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, (int, float)):
        return str(value)
    if "bytes" in name.split() and abs(value) >= 1e6:
        return f"{value / 1e9:,.3g} GB" if abs(value) >= 1e9 else f"{value / 1e6:.3g} MB"
    if abs(value) >= 1e9:
        return f"{value / 1e9:,.3g} billion"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _table(names: list[str], rows: list[list[str]]) -> Iterator[str]:
    if rows:
        yield f"| {' | '.join(names)} |"
        yield f"|{'---|' * len(names)}"
        yield from (f"| {' | '.join(_cell(cell) if cell else '–' for cell in row)} |" for row in rows)
        yield ""
