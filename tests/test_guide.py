"""docs/guide.md works: each diff applies to the code, and in a copy with all of them the recipes do what they say."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
GUIDE = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")
RECIPES = dict(re.findall(r"^## (.*)\n((?:(?!## ).*\n)+)", GUIDE, re.MULTILINE))
DIFFS = {name: re.findall(r"^```diff\n(.*?)^```$", text, re.MULTILINE | re.DOTALL) for name, text in RECIPES.items()}


def copy_tree(folder: Path) -> Path:
    for name in ("zaya_jax", "pallas_kernels"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def apply_diffs(diffs: list[str], root: Path) -> list[Path]:
    """Apply diffs as the page describes them to the tree in `root`; returns the files."""
    paths = []
    for diff in diffs:
        for name, body in re.findall(r"^\+\+\+ b/(\S+)\n((?:(?!\+\+\+ ).*\n)+)", diff, re.MULTILINE):
            path = root / name
            lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
            for hunk in filter(None, re.split(r"^@@\n", body, flags=re.MULTILINE)):
                lines = apply_hunk(hunk.splitlines(), lines, name)
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")
            paths.append(path)
    return paths


def apply_hunk(hunk: list[str], lines: list[str], name: str) -> list[str]:
    imports = [line[1:] for line in hunk if re.match(r"\+(import|from) ", line)] if lines else []
    if imports:
        first = next(i for i, line in enumerate(lines) if re.match("(import|from) ", line))
        lines = [*lines[:first], *imports, *lines[first:]]
        hunk = [line for line in hunk if line[1:] not in imports]
    old = [line[1:] for line in hunk if line[0] != "+"]
    bare = [line.split("  # ")[0] for line in lines]  # the page omits comments
    places = [i for i in range(len(lines) - len(old) + 1) if bare[i : i + len(old)] == old]
    assert len(places) == 1 or not lines, f"docs/guide.md quotes lines that {name} has in {len(places)} places: {old}"
    here = iter(lines[places[0] :]) if old else iter(())
    new = [line[1:] if line[0] == "+" else next(here) for line in hunk if line[0] != "-" or next(here) is None]
    return [*lines[: places[0]], *new, *here]


@pytest.mark.parametrize("recipe", DIFFS)
def test_each_recipe_applies_alone_and_defines_all_names_that_it_uses(recipe: str, tmp_path: Path):
    paths = apply_diffs(DIFFS[recipe], copy_tree(tmp_path))
    assert paths
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "E9,F", *paths]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_guide_answers_the_ten_questions_briefly():
    assert len(RECIPES) == 10
    assert len(GUIDE.splitlines()) <= 320


def test_the_pictures_of_the_architecture_name_files_that_exist():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    pictures = "".join(re.findall(r"^```none\n(.*?)^```$", page, re.MULTILINE | re.DOTALL))
    names = re.findall(r"\w+/[\w/]+\.py", pictures)
    assert len(names) > 30
    assert [name for name in names if not (ROOT / "zaya_jax" / name).exists()] == []


def test_in_a_copy_of_the_code_all_recipes_do_what_they_say(tmp_path: Path):
    apply_diffs([diff for diffs in DIFFS.values() for diff in diffs], copy_tree(tmp_path))
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "JAX_PLATFORMS": "cpu"}
    script = ROOT / "tests" / "guide_checks.py"
    done = subprocess.run([sys.executable, "-P", script, tmp_path], cwd=ROOT, env=environment, capture_output=True,
                          text=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
