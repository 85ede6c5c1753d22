"""A pytest plugin that prints the CPU-seconds of tests, by folder: `make test-times`.

Counts this process, the processes that a test starts, and those that tests share. CPU-seconds depend on the machine by
a factor of two, so budgets ([tool.test-budgets] in pyproject.toml) are scaled by how much slower this machine is than
the one that set them.

`python -m tests.tools.times` says how long `make test` will take.
"""

import contextlib
import json
import os
import resource
import subprocess
import sys
import tomllib
from collections import defaultdict
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).parent.parent.parent
TIMES = Path(__file__).parent / "times.json"
_SLOWEST = 15
_WORKERS = 4  # at most, in the Makefile


def cpu_seconds() -> float:
    """CPU-seconds of this process and of all that it has started, alive or not."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    seconds = sum(usage.ru_utime + usage.ru_stime for usage in usages)
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has just ended
            seconds += sum(process.cpu_times()[:4])
    return seconds


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item):
    """Count the set-up of a test."""
    return (yield from _counted(item, "setup"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item):
    """Count a test."""
    return (yield from _counted(item, "call"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item):
    """Count the end of a test."""
    return (yield from _counted(item, "teardown"))


def _counted(item: pytest.Item, phase: str):
    before = cpu_seconds()
    try:
        return (yield)
    finally:
        item.user_properties.append((f"cpu-{phase}", cpu_seconds() - before))


class Times:
    """Gathers, where the results of all workers arrive, what each test took."""

    def __init__(self) -> None:
        self.tests: dict[str, dict[str, float]] = defaultdict(dict)  # by test and phase

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep a phase's CPU-seconds."""
        for name, seconds in report.user_properties:
            if str(name).startswith("cpu-"):
                self.tests[report.nodeid][str(name).removeprefix("cpu-")] = float(seconds)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print CPU-seconds by folder, the slowest tests, and the slowest set-ups."""
        write = terminalreporter.write_line
        folders, files, counts = defaultdict(float), defaultdict(float), defaultdict(int)
        for test, phases in self.tests.items():
            seconds = sum(phases.values())
            folders[folder(test)] += seconds
            files[test.split("::")[0]] += seconds
            counts[folder(test)] += 1
        with (ROOT / "pyproject.toml").open("rb") as file:
            budgets = tomllib.load(file)["tool"]["test-budgets"]
        reference = reference_seconds()
        slower = reference / budgets.pop("reference")
        terminalreporter.section("CPU-seconds by folder")
        write(f"This machine takes {slower:.2f} times as long as the one that set the budgets, which are scaled by it.")
        for name, seconds in sorted(folders.items(), key=lambda one: -one[1]):
            budget = budgets.get(name, 0) * slower
            over = "  over budget" * (seconds > budget)
            write(f"{name:<12} {counts[name]:5d} tests {seconds:7.1f} of {budget:6.1f}{over}")
        total, budget = sum(folders.values()), slower * sum(budgets.get(name, 0) for name in folders)
        write(f"{'all':<12} {len(self.tests):5d} tests {total:7.1f} of {budget:6.1f}")
        for phase, title in (("call", "tests"), ("setup", "set-ups")):
            terminalreporter.section(f"slowest {title}, CPU-seconds")
            for test, phases in sorted(self.tests.items(), key=lambda one: -one[1].get(phase, 0.0))[:_SLOWEST]:
                write(f"{phases.get(phase, 0.0):7.1f} {test}")
        if path := terminalreporter.config.option.times_json:
            record = {"reference": round(reference, 2), "total": round(total, 1), "tests": len(self.tests)}
            for name, group in (("folders", folders), ("files", files)):
                record[name] = {key: round(seconds, 2) for key, seconds in sorted(group.items())}
            Path(path).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def folder(test: str) -> str:
    """The folder below `tests` of a test; `tests` for those in none."""
    parts = test.partition("::")[0].split("/")
    return parts[1] if len(parts) > 2 else parts[0]


def reference_seconds(repeats: int = 3) -> float:
    """CPU-seconds of the imports that every test needs, the least of a few: how fast this machine runs Python."""
    code = "import jax, flax, optax, orbax.checkpoint, grain, hypothesis"
    times = []
    for _ in range(repeats):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(times)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--times-json`."""
    parser.addoption("--times-json", metavar="FILE", help="also write CPU-seconds by folder and file to FILE")


def pytest_configure(config: pytest.Config) -> None:
    """Print where the results arrive, not in the workers."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Times())


def expected_minutes(record: dict[str, Any], reference: float, cpus: int) -> float:
    """Minutes of `make test` where the imports take `reference` CPU-seconds, from an earlier `record`."""
    return record["total"] * reference / record["reference"] / min(cpus, _WORKERS) / 60


def main() -> None:
    """Say how long the tests will take on this machine."""
    record = json.loads(TIMES.read_text(encoding="utf-8"))
    minutes = expected_minutes(record, reference_seconds(1), os.cpu_count() or 1)
    longer = "the first time, compiling takes about half as long again"
    print(
        f"The tests take about {max(minutes, 1):.0f} minutes here; {longer}. To test a change in a minute: make quick"
    )


if __name__ == "__main__":
    main()
