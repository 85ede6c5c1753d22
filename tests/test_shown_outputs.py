"""The outputs that pages show are what the commands print: recorded when made, and the cheap ones run here."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pages_helpers import PAGES
from tests.tools.pages import PICTURES, RECORD, ROOT, anonymous, differences, digest, rewritten, run, shown

RECORDED = json.loads(RECORD.read_text(encoding="utf-8"))
# Commands that need no run, and take seconds; by page, the place among its outputs, and the tolerance of numbers, if
# they do not depend on the machine.
CHEAP = [("docs/parallel.md", 1, 0.02), ("docs/configuration.md", 0, 0.0)]

SHOWN = """step 10/600 | loss 6.8 | ETA 4:42
...
step 600/600 | loss 2.4 | ETA 0:00
Continuation:
def main(x):
    return x
...
Run folder: runs/tiny
"""
PRINTED = """data: 7 files
step 10/600 | loss 6.5 | ETA 5:10
step 300/600 | loss 3.1 | ETA 2:30
step 500/600 | loss 2.4 | ETA 0:00
step 600/600 | loss 2.2 | ETA 0:00
Continuation:

class A:
    pass
Wrote summary.json
Run folder: runs/tiny
"""


@pytest.mark.parametrize("page", PAGES)
def test_an_output_is_the_recorded_one(page):
    """`make pages` rewrites outputs, and records their digests: edited by hand, they need not be true."""
    outputs = [digest(output.text) for _, output in shown(PAGES[page])]
    assert outputs == [output["digest"] for output in RECORDED.get(page, {"outputs": []})["outputs"]]


def test_pictures_are_those_of_the_readme_s_run():
    drawn = {picture: digest((ROOT / picture).read_bytes()) for picture in PICTURES}
    assert drawn == RECORDED["README.md"]["pictures"]


@pytest.mark.parametrize(("page", "place", "tolerance"), CHEAP)
def test_a_command_prints_what_the_page_shows(page, place, tolerance):
    commands, output = list(shown(PAGES[page]))[place]
    printed = run(commands.command(), ROOT)
    assert not printed.returncode, printed.stdout
    assert differences(output.text, anonymous(printed.stdout, ROOT), tolerance) == []


def test_an_output_gets_new_numbers_and_free_text_and_keeps_what_it_leaves_out():
    assert rewritten(SHOWN, PRINTED) == """step 10/600 | loss 6.5 | ETA 5:10
...
step 600/600 | loss 2.2 | ETA 0:00
Continuation:

class A:
...
Run folder: runs/tiny
"""  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("loss 6.5", "loss 6.6", []),
        ("loss 6.5", "loss 9.5", ["6.5 is 9.5: "]),
        ("Continuation:", "Sample:", ["not printed: Continuation:"]),
        ("Run folder: runs/tiny", "", ["not printed: Run folder"]),
    ],
)
def test_other_forms_and_numbers_are_found(old, new, said):
    made = rewritten(SHOWN, PRINTED)
    found = differences(made, PRINTED.replace(old, new), 0.05)
    assert [line[: len(start)] for line, start in zip(found, said, strict=True)] == said


@given(st.lists(st.text("ab 12.", max_size=6), max_size=8).map("\n".join), st.randoms())
def test_a_rewritten_output_is_rewritten_to_itself(printed, random):
    """Whatever lines of it are left out."""
    lines = [line.replace(".", ",") for line in printed.splitlines()]
    kept = ["..." if random.random() < 0.4 else line for line in lines]
    made = rewritten("\n".join(kept) + "\n", "\n".join(lines))
    assert rewritten(made, "\n".join(lines)) == made
