"""Map the lines of the product to the tests that run them, also in processes that tests start."""

import collections
import os
import sqlite3
import subprocess
from pathlib import Path

_CONFIGURATION = """[run]
source_pkgs = zaya_jax, pallas_kernels
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
        self._lines: dict[str, dict[str, bytes]] = collections.defaultdict(dict)  # by file and test
        for test, file, numbits in rows:
            self._lines[file][test] = numbits
        self._tests = {test for tests in self._lines.values() for test in tests if "::" in test}

    def knows(self, test: str) -> bool:
        """Whether the suite has a test of this name."""
        return test in self._tests

    def tests(self, file: str, lines: range) -> list[str]:
        """List the tests that run one of `lines`.

        Of lines that only imports or long-lived processes run: the tests of the file, then those of its folder.
        """
        room = file.split("/")[1] if file.startswith("zaya_jax") else "ops"
        of_file = {test: numbits for test, numbits in self._lines[file].items() if "::" in test}
        of_room = {test for test in self._tests if test.startswith(f"tests/{room}/")}
        covering = {test for test, numbits in of_file.items() if any(_has(numbits, line) for line in lines)}
        # Tests of the same folder come first: they are the likeliest to fail.
        return sorted(covering or of_room | of_file.keys(),
                      key=lambda test: (test not in of_file, test not in of_room, test))  # fmt: skip


def _has(numbits: bytes, line: int) -> bool:
    return line // 8 < len(numbits) and bool(numbits[line // 8] & (1 << line % 8))
