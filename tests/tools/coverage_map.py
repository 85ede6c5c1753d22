"""Map the lines of the product to the tests that run them, also in processes that tests start."""

import collections
import os
import sqlite3
import subprocess
from pathlib import Path

_CONFIGURATION = """[run]
source_pkgs = zaya_jax, pallas_kernels, benchmarks
data_file = {folder}/data
parallel = true
relative_files = true
context = ${{COVER_TEST-}}
patch = subprocess
sigterm = true
"""


def record(tree: Path, output: Path) -> None:
    """Run all tests of `tree` under coverage.py (in the environment of `tree`) and write the map to `output`."""
    folder = tree / ".cover"
    folder.mkdir()
    settings = folder / "coveragerc"
    settings.write_text(_CONFIGURATION.format(folder=folder), encoding="utf-8")
    python = tree / ".venv" / "bin" / "python"
    plugin = Path(__file__).parent / "coverage_plugin.py"
    (folder / "coverage_plugin.py").write_bytes(plugin.read_bytes())
    environment = {**os.environ, "PYTHONPATH": f"{folder}:{tree}", "COVERAGE_PROCESS_START": str(settings)}
    tests = [python, "-m", "coverage", "run", f"--rcfile={settings}", "-m", "pytest", "-p", "coverage_plugin", "-q",
             "-n", "logical", "--dist", "loadfile", "--no-header"]  # fmt: skip
    done = subprocess.run(tests, cwd=tree, env=environment, check=False)
    print(f"The tests ended with status {done.returncode}.", flush=True)
    subprocess.run([python, "-m", "coverage", "combine", "-q", f"--rcfile={settings}"], cwd=tree, check=True)
    output.write_bytes((folder / "data").read_bytes())


class CoverageMap:
    """Reads what `record` wrote."""

    def __init__(self, path: Path) -> None:
        self._database = sqlite3.connect(f"file:{path}?mode=ro", uri=True, check_same_thread=False)
        rows = self._database.execute(
            "select context.context, file.path, numbits from line_bits"
            " join context on context.id = context_id join file on file.id = file_id"
        )
        # By file and test, of one or several processes.
        self._lines: dict[str, dict[str, list[bytes]]] = collections.defaultdict(lambda: collections.defaultdict(list))
        for context, file, numbits in rows:
            # In a process that serves several tests, the one that started it comes first.
            self._lines[file]["tests/" + context.rpartition("tests/")[2]].append(numbits)
        self._tests = {test for tests in self._lines.values() for test in tests if "::" in test}

    def knows(self, test: str) -> bool:
        """Whether the suite has a test of this name."""
        return test in self._tests

    def tests(self, file: str, lines: range) -> list[str]:
        """List the tests that run one of `lines`, or the test files and folder of lines that no test is known to run.

        These are lines that only imports or long-lived processes run. A test that starts such a process may run no
        line itself.
        """
        package, room, *inside = file.split("/")
        here = "tests/ops/" if package == "pallas_kernels" else f"tests/{room}/" if inside else "tests/test_"
        of_file = {test: numbits for test, numbits in self._lines[file].items() if "::" in test}
        covering = {test for test, numbits in of_file.items() if any(_has(numbits, line) for line in lines)}
        if not covering:
            files = {test.partition("::")[0] for test in of_file}
            folder = [here] if here.endswith("/") else []
            return [*sorted(path for path in files if path.startswith(here)), *folder,
                    *sorted(path for path in files if not path.startswith(here))]  # fmt: skip
        # Tests of the same folder come first: they are the likeliest to fail.
        return sorted(covering, key=lambda test: (not test.startswith(here), test))


def _has(processes: list[bytes], line: int) -> bool:
    return any(line // 8 < len(numbits) and numbits[line // 8] & (1 << line % 8) for numbits in processes)
