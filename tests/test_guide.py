"""docs/guide.md fits the code: the lines that its diffs replace, and the files that they edit, exist."""

import re
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
