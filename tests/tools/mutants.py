"""Compare how many faults two test suites find: `python -m tests.tools.mutants draw|cover|run|compare`.

A mutant is the product with one small fault: a comparison inverted, a constant changed, a statement left out. A suite
kills it if one of its tests fails. `draw` draws mutants, `cover` records which test runs which line, `run` runs the
tests that cover a mutant's line until one fails, for 120 CPU-seconds at most, and `compare` lists what one suite kills
and the other does not. A mutant that runs into the limit is not killed, nor is one that is killed by a test that fails
without it, too.

    python -m tests.tools.mutants draw --seed 1 --count 60 --output mutants.json
    python -m tests.tools.mutants cover --tree ../old --output old.cover
    python -m tests.tools.mutants run --tree ../old --mutants mutants.json --cover old.cover --output old.json
    python -m tests.tools.mutants compare --mutants mutants.json --old old.json --new new.json --output both.json

`--tree` names a checkout with a `.venv` from `make test`. `cover` and `run` work in copies of it.
"""

import argparse
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.tools.coverage_map import CoverageMap, record
from tests.tools.mutations import Mutant, apply, draw

ROOT = Path(__file__).parent.parent.parent
SECONDS = 120  # CPU-seconds of the process that runs a mutant's tests
HANG = 600  # seconds, after which a mutant hangs
# Nothing of a copied tree but its sources; the environment is reached through a link.
_LEFT_OUT = shutil.ignore_patterns(".git", ".venv*", "__pycache__", ".hypothesis", "build", "dist", "runs")


def copy_tree(tree: Path, folder: Path) -> Path:
    """Copy the sources of `tree` to `folder`."""
    shutil.copytree(tree, folder, ignore=_LEFT_OUT, symlinks=True)
    (folder / ".venv").symlink_to(tree / ".venv")
    return folder


def run_tests(copy: Path, tests: list[str], cache: Path) -> tuple[str, str]:
    """Run `tests` in turn until one fails; returns `killed`, `survived`, `timeout` or `hang`, and what failed."""
    arguments = copy / ".mutant_tests"
    arguments.write_text("\n".join(tests), encoding="utf-8")
    python = copy / ".venv" / "bin" / "python"
    command = ["prlimit", f"--cpu={SECONDS}", python, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider",
               "--no-header", "--tb=line", f"@{arguments}"]  # fmt: skip
    # The path comes before the environment's own, which names the tree itself.
    environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(cache), "PYTHONDONTWRITEBYTECODE": "1",
                   "PYTHONPATH": str(copy)}  # fmt: skip
    with (copy / ".mutant_log").open("w+", encoding="utf-8") as log:
        process = subprocess.Popen(command, cwd=copy, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                   start_new_session=True)  # fmt: skip
        try:
            status = process.wait(HANG)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            subprocess.run(["pkill", "-KILL", "-s", str(process.pid)], check=False)
            process.wait()
        log.seek(0)
        output = log.read()
    if status is None:
        return "hang", ""
    if status in (-signal.SIGXCPU, -signal.SIGKILL):
        return "timeout", ""
    if status == 0:
        return "survived", ""
    failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", output, re.MULTILINE)
    return "killed", failed[0] if failed else f"status {status}: {output.strip()[-200:]}"


def run_mutants(
    tree: Path, mutants: list[Mutant], cover: CoverageMap, workers: int, first: dict[int, str]
) -> list[Any]:
    """Run each mutant on the tests of `tree` that cover its line.

    Args:
      tree: checkout with an environment.
      mutants: drawn from any tree; a mutant is found again by its line's text.
      cover: which test of `tree` runs which line.
      workers: how many mutants to run at the same time.
      first: by mutant, a test to begin with.
    """
    copies, folder = threading.local(), Path(tempfile.mkdtemp(prefix="mutants-"))
    cache = tree / ".pytest_cache" / "jax"

    def run(mutant: Mutant) -> dict[str, Any]:
        if not hasattr(copies, "folder"):
            copies.folder = copy_tree(tree, folder / threading.current_thread().name)
        begun, path = time.monotonic(), copies.folder / mutant.file
        text, outcome, by, tests = path.read_text(encoding="utf-8"), "uncovered", "", []
        try:
            mutated, lines = apply(mutant, text)
            tests = cover.tests(mutant.file, lines)
        except LookupError:
            outcome = "absent"
        chosen = first.get(mutant.number, "")
        if cover.knows(chosen):
            tests = [chosen, *(test for test in tests if test != chosen)]
        if tests:
            path.write_text(mutated, encoding="utf-8")
            try:
                outcome, by = run_tests(copies.folder, tests, cache)
            finally:
                path.write_text(text, encoding="utf-8")
            # A test that fails without the fault as well has not found it.
            again = [by] if "::" in by else tests
            if outcome == "killed" and run_tests(copies.folder, again, cache)[0] == "killed":
                outcome = "flaky"
        result = {"number": mutant.number, "outcome": outcome, "by": by, "tests": len(tests),
                  "seconds": round(time.monotonic() - begun, 1)}  # fmt: skip
        print(json.dumps(result), flush=True)
        return result

    try:
        with ThreadPoolExecutor(workers) as pool:
            return list(pool.map(run, mutants))
    finally:
        shutil.rmtree(folder)


def compare(mutants: list[Mutant], old: list[Any], new: list[Any]) -> dict[str, Any]:
    """Count by room what each suite kills, and list what only the old one does.

    Mutants that the old suite does not kill may be missing in `new`.
    """
    unseen = {mutant.number: {"number": mutant.number, "outcome": "not run"} for mutant in mutants}
    by_old, by_new = (unseen | {result["number"]: result for result in results} for results in (old, new))
    rooms = {room: Counter() for room in sorted({mutant.room for mutant in mutants})}
    lost, gained, survivors = [], [], []
    for mutant in mutants:
        before, after = (results[mutant.number]["outcome"] == "killed" for results in (by_old, by_new))
        count = rooms[mutant.room]
        count["mutants"] += 1
        count["killed_by_old"] += before
        count["killed_by_new"] += after
        entry = {**mutant._asdict(), "old": by_old[mutant.number], "new": by_new[mutant.number]}
        if before and not after:
            lost.append(entry)
        elif after and not before:
            gained.append(entry)
        elif not after:
            survivors.append(entry)
    return {"rooms": {room: dict(count) for room, count in rooms.items()}, "lost": lost, "gained": gained,
            "survivors_of_both": survivors}  # fmt: skip


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def _mutants(path: Path) -> list[Mutant]:
    return [Mutant(**one) for one in _read(path)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    one = verbs.add_parser("draw", help="draw mutants of the product, in proportion to each package's lines")
    one.add_argument("--tree", type=Path, default=ROOT)
    one.add_argument("--seed", type=int, required=True)
    one.add_argument("--count", type=int, default=60)
    one = verbs.add_parser("cover", help="run a tree's tests and record which test runs which line")
    one.add_argument("--tree", type=Path, required=True)
    one = verbs.add_parser("run", help="run the tests that cover each mutant")
    one.add_argument("--tree", type=Path, required=True)
    one.add_argument("--mutants", type=Path, required=True)
    one.add_argument("--cover", type=Path, required=True)
    one.add_argument("--first", type=Path, help="results of another run: begin with the tests that killed there")
    one.add_argument("--only", type=int, nargs="*", help="numbers of mutants")
    one.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    one = verbs.add_parser("compare", help="list what one suite kills and the other does not")
    for name in ("--mutants", "--old", "--new"):
        one.add_argument(name, type=Path, required=True)
    for one in verbs.choices.values():
        one.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    if args.verb == "draw":
        _write(args.output, [mutant._asdict() for mutant in draw(args.tree, args.seed, args.count)])
    elif args.verb == "cover":
        with tempfile.TemporaryDirectory() as folder:
            record(copy_tree(args.tree.resolve(), Path(folder) / "tree"), args.output)
    elif args.verb == "run":
        mutants = [mutant for mutant in _mutants(args.mutants) if args.only is None or mutant.number in args.only]
        first = {one["number"]: one["by"] for one in _read(args.first)} if args.first else {}
        _write(args.output, run_mutants(args.tree.resolve(), mutants, CoverageMap(args.cover), args.workers, first))
    else:
        result = compare(_mutants(args.mutants), _read(args.old), _read(args.new))
        commands = {"command": " ".join(sys.argv), "python": platform.python_version(), "cpu": platform.processor()}
        _write(args.output, commands | result)
        print(json.dumps({name: len(result[name]) for name in ("lost", "gained", "survivors_of_both")}))


if __name__ == "__main__":
    main()
