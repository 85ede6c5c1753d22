"""A pytest plugin that prints the CPU-seconds of tests, by folder: `make test-times`.

Counts this process, the processes that a test starts, and those that tests share. CPU-seconds depend on the machine by
a factor of two, so a budget is compared after dividing by how much slower this machine is than the one that set it.
"""

import json
import os
import resource
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
BUDGETS = Path(__file__).parent / "budgets.json"
_TICKS = os.sysconf("SC_CLK_TCK")
_SLOWEST = 15


def cpu_seconds() -> float:
    """CPU-seconds of this process and of all that it has started, alive or not."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages) + sum(map(_alive, _children(os.getpid())))


def _children(process: int) -> list[int]:
    try:
        threads = list(Path(f"/proc/{process}/task").iterdir())
        return [int(child) for thread in threads for child in (thread / "children").read_text().split()]
    except OSError:  # it has just ended
        return []


def _alive(process: int) -> float:
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / _TICKS + sum(map(_alive, _children(process)))


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
        rooms, counts = defaultdict(float), defaultdict(int)
        for test, phases in self.tests.items():
            rooms[room(test)] += sum(phases.values())
            counts[room(test)] += 1
        budgets = json.loads(BUDGETS.read_text(encoding="utf-8"))
        slower = reference_seconds() / budgets["reference"]
        terminalreporter.section("CPU-seconds by folder")
        write(f"This machine takes {slower:.2f} times as long as the one that set the budgets, which are scaled by it.")
        for name, seconds in sorted(rooms.items(), key=lambda one: -one[1]):
            budget = budgets["folders"].get(name, 0) * slower
            write(f"{name:<20} {counts[name]:5d} tests {seconds:7.1f} of {budget:6.1f}{'  over' * (seconds > budget)}")
        budget = slower * sum(budgets["folders"].values())
        write(f"{'all':<20} {len(self.tests):5d} tests {sum(rooms.values()):7.1f} of {budget:6.1f}")
        for phase, title in (("call", "tests"), ("setup", "set-ups")):
            terminalreporter.section(f"slowest {title}, CPU-seconds")
            slowest = sorted(self.tests.items(), key=lambda one: -one[1].get(phase, 0.0))[:_SLOWEST]
            for test, phases in slowest:
                write(f"{phases.get(phase, 0.0):7.1f} {test}")
        if path := terminalreporter.config.option.times_json:
            record = {test: round(sum(phases.values()), 3) for test, phases in sorted(self.tests.items())}
            Path(path).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def room(test: str) -> str:
    """The folder below `tests` of a test; `tests` for those in none."""
    parts = test.split("::")[0].split("/")
    return parts[1] if len(parts) > 2 else parts[0]


def reference_seconds() -> float:
    """CPU-seconds of the imports that every test needs, the least of three: how fast this machine runs Python."""
    code = "import jax, flax, optax, orbax.checkpoint, grain, hypothesis"
    times = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(times)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--times-json`."""
    parser.addoption("--times-json", metavar="FILE", help="also write the CPU-seconds of each test to FILE")


def pytest_configure(config: pytest.Config) -> None:
    """Print where the results arrive, not in the workers."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Times())
