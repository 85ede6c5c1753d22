"""Run what a change can break, in about a minute: `make quick`, or `python -m tests.tools.quick [--base COMMIT]`.

Lints and type-checks the changed files, checks the import contracts, and runs the tests that import what was changed,
the nearest first. It chooses as many files as fit in the budget by the times of an earlier run, and as a pytest plugin
skips the tests that are left when the time is over, since machines differ. Both are counted. `make test` runs all.
"""

import argparse
import ast
import json
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import grimp
import pytest

from tests.tools.times import TIMES

ROOT = Path(__file__).parent.parent.parent
PACKAGES = ("zaya_jax", "pallas_kernels", "benchmarks")
_ELSEWHERE = ("parity", "soak")  # not part of `make test`
_NONE_RAN = 5  # status of pytest if all tests of the files are marked for other commands
_UNKNOWN_SECONDS = 2.0  # of a test file that no record has: the mean of those that are recorded
_START = time.monotonic()


def changed_files(base: str) -> list[str]:
    """List paths that differ from commit `base`, deleted ones too, and untracked ones."""
    listed = []
    for command in (
        ["git", "diff", "--name-only", "-z", base],
        ["git", "ls-files", "-z", "--others", "--exclude-standard"],
    ):
        listed += subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    return sorted({name for name in listed if name})


def module(path: str) -> str:
    """The module of a Python file."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def import_graph() -> dict[str, set[str]]:
    """Return, for each module, the modules of the packages and of the tests that import it."""
    graph = grimp.build_graph(*PACKAGES, cache_dir=str(ROOT / ".import_linter_cache"))
    importers = {name: graph.find_modules_that_directly_import(name) for name in graph.modules}
    importers = defaultdict(set, importers)
    for path in (ROOT / "tests").rglob("*.py"):
        name = module(str(path.relative_to(ROOT)))
        for imported in _imports(path):
            importers[imported].add(name)
        if path.name == "conftest.py":
            importers[name] |= {module(str(test.relative_to(ROOT))) for test in path.parent.rglob("test_*.py")}
    return importers


def _imports(path: Path) -> Iterable[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("tests."):
            yield node.value.partition(":")[0]  # a function that runs in another process


def distances(changed: list[str], importers: dict[str, set[str]]) -> dict[str, int]:
    """Count the imports between each test file and the nearest changed file; leave out those that no change reaches.

    A test in the folder of a changed module is nearer by one than others. A file that is not Python reaches the tests
    that name it or its folder.
    """
    front = {module(path) for path in changed if path.endswith(".py")}
    rooms = {path.split("/")[1] for path in changed if path.startswith(("zaya_jax/", "tests/")) and path.count("/") > 1}
    others = {
        word for path in changed if not path.endswith(".py") for word in (path, Path(path).name, *Path(path).parts[:1])
    }
    found: dict[str, int] = {}
    distance, seen = 0, set(front)
    while front:
        found |= {name: distance for name in front if name.rpartition(".")[2].startswith("test_")}
        front = {importer for name in front for importer in importers[name]} - seen
        seen |= front
        distance += 1
    result = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        name = str(path.relative_to(ROOT))
        if name.split("/")[1] in _ELSEWHERE:
            continue
        steps = found.get(module(name))
        if steps is None and others:
            text = path.read_text(encoding="utf-8")
            steps = 1 if any(f'"{word}"' in text or f"{word})" in text for word in others) else None
        if steps is not None:
            result[name] = 2 * steps - (name.split("/")[1] in rooms)
    return result


def choose(near: dict[str, int], seconds: dict[str, float], budget: float) -> tuple[list[str], list[str]]:
    """Divide test files into those that fit in `budget` CPU-seconds, the nearest first, and the rest."""
    chosen, left, used = [], [], 0.0
    for name in sorted(near, key=lambda name: (near[name], seconds.get(name, _UNKNOWN_SECONDS))):
        cost = seconds.get(name, _UNKNOWN_SECONDS)
        if not near[name] or used + cost <= budget:  # a changed test always runs
            chosen.append(name)
            used += cost
        else:
            left.append(name)
    return chosen, left


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--quick-seconds`."""
    parser.addoption("--quick-seconds", type=float, help="skip the tests that have not started by then")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test if the time is over."""
    if time.monotonic() - _START > item.config.option.quick_seconds:
        pytest.skip("the time is over; `make test` runs all")


def main() -> int:
    """Run the checks; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="HEAD", help="commit to compare the working tree with (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=50, help="for the tests (default: %(default)s)")
    args = parser.parse_args()
    changed = changed_files(args.base)
    if not changed:
        print(
            f"No file differs from {args.base}. To check the last commits, name an earlier one: make quick BASE=HEAD~1"
        )
        return 0
    python = [path for path in changed if path.endswith(".py") and (ROOT / path).exists()]
    recorded = json.loads(TIMES.read_text(encoding="utf-8"))["files"]
    chosen, left = choose(distances(changed, import_graph()), recorded, args.seconds)
    print(f"{len(changed)} changed files; {len(chosen)} of {len(chosen) + len(left)} test files that they can break")
    print("\n".join(f"  {name}" for name in chosen), flush=True)

    checks = [[Path(sys.executable).with_name("lint-imports"), "--no-logo"]]
    if python:
        checks += [[sys.executable, "-m", "ruff", *how, "-q", *python] for how in (["check"], ["format", "--check"])]
    if typed := [path for path in python if path.startswith(PACKAGES)]:
        checks.append([sys.executable, "-m", "basedpyright", "--pythonpath", sys.executable, *typed])
    # They take one core, the tests the other.
    running = [subprocess.Popen(check, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
               for check in checks]  # fmt: skip
    status = 0
    if chosen:
        pytest_command = [sys.executable, "-m", "pytest", "-q", "-rs", "--no-header", "-p", "tests.tools.quick"]
        limit = f"--quick-seconds={args.seconds}"
        status = subprocess.run([*pytest_command, limit, *chosen], cwd=ROOT, check=False).returncode
    for check in running:
        output, _ = check.communicate()
        if check.returncode:
            print(output)
            status = status if status not in (0, _NONE_RAN) else 1
    if left:
        seconds = sum(recorded.get(name, _UNKNOWN_SECONDS) for name in left)
        print(f"Not run: {len(left)} test files further away ({seconds:.0f} CPU-seconds); `make test` runs all.")
    return 0 if status == _NONE_RAN else status


if __name__ == "__main__":
    sys.exit(main())
