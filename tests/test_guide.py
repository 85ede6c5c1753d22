"""docs/guide.md fits the code: the lines that its diffs replace, and the files that they edit, exist."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
GUIDE = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")
DIFFS = re.findall(r"^```diff\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)
EDITS = [edit for diff in DIFFS for edit in re.findall(r"^\+\+\+ b/(\S+)\n((?:(?!\+\+\+).*\n)+)", diff, re.MULTILINE)]


@pytest.mark.parametrize(("name", "lines"), EDITS, ids=[name for name, _ in EDITS])
def test_what_a_diff_replaces_is_there(name: str, lines: str):
    path = ROOT / name
    replaced = re.findall(r"^-(.*)", lines, re.MULTILINE)
    if not path.exists():
        assert not replaced
        assert path.parent.is_dir()
        return
    text = path.read_text(encoding="utf-8")
    assert [line for line in replaced if line not in text] == []
    places = re.findall(r"^@@ (?:before )?((?:class|def) \w+|\w+)", lines, re.MULTILINE)
    assert [place for place in places if place not in text] == []


def test_the_guide_answers_the_ten_questions_briefly():
    assert len(re.findall(r"^## ", GUIDE, re.MULTILINE)) == 10
    assert len(GUIDE.splitlines()) <= 250


# What the code says of the new axis, in a copy of it: where layers lie, which numbers of devices fit, and the table.
REPLICAS = """
from zaya_jax.aegis.training_command import fits
from zaya_jax.config import load_config
from zaya_jax.lab.predict.dry_run.estimate import simulated_programs
from zaya_jax.parallel.storage import storage_rows

config = load_config("configs/tiny.yaml", ["parallel.replica=2", "parallel.fsdp=2", "train.batch.tokens=24576"])
program = simulated_programs(config, 12)[0]
matrices = [leaf for leaf in program.placement.leaves.values() if leaf.in_layer]
assert matrices and all(leaf.by_layer and "replica" not in leaf.split for leaf in matrices)
rows = storage_rows(program.placement, program.abstract_state)
assert all("replica" in row.replicated_over for row in rows)
assert [fits(config, devices) for devices in (2, 4, 6, 12)] == [False, True, False, True]
"""


def test_the_recipe_of_a_parallel_axis_gives_one_that_all_code_sees(tmp_path: Path):
    shutil.copytree(ROOT / "zaya_jax", tmp_path / "zaya_jax")
    path = tmp_path / "zaya_jax/config/parallel.py"
    (lines,) = (lines for name, lines in EDITS if name == "zaya_jax/config/parallel.py")
    text, (tables, field) = path.read_text(encoding="utf-8"), lines.split("@@ class ParallelConfig:\n")
    for sign, other in (("-", "+"),):
        old, new = (re.findall(rf"^\{mark}(.*)", tables, re.MULTILINE) for mark in (sign, other))
        for before, after in zip(old, new, strict=True):
            text = text.replace(before, after)
    first = "    data: Positive[int] | None"
    assert text.count(first) == 1
    path.write_text(text.replace(first, f"{field[1:].splitlines()[0]}\n{first}"), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-P", "-c", REPLICAS], cwd=ROOT, env=environment, capture_output=True,
                          text=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
