"""What the README and the pages of docs/ name exists: links, headings, files, configuration keys, make targets."""

import re
from collections.abc import Iterator

import pytest

from tests.pages_helpers import PAGES, ROOT
from zaya_jax.config import load_config, to_dict

FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def anchors(text: str) -> set[str]:
    """The names by which links reach the headings of a page."""
    titles = re.findall(r"^#+ (.+)$", FENCED.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def config_keys(tree: dict, prefix: str = "") -> Iterator[str]:
    for key, value in tree.items():
        yield prefix + key
        if isinstance(value, dict):
            yield from config_keys(value, f"{prefix}{key}.")


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str):
    for link in re.findall(r"\]\(([^)\s]+)\)", PAGES[page]):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text(encoding="utf-8")), link


def test_configuration_keys_exist():
    tree = to_dict(load_config(ROOT / "configs" / "tiny.yaml"))
    known = set(config_keys(tree))
    sections = "|".join(key for key, value in tree.items() if isinstance(value, dict))
    named = [
        (page, name)
        for page, text in PAGES.items()
        if page != "docs/guide.md"  # whose examples add keys
        for name in re.findall(rf"`((?:{sections})(?:\.[a-z0-9_]+)+)(?:[:=][^`\n]*)?`", FENCED.sub("", text))
        if not name.endswith((".md", ".py"))
    ]
    assert ("docs/training.md", "train.max_skipped_steps") in named
    assert [name for name in named if name[1] not in known] == []


@pytest.mark.parametrize("page", PAGES)
def test_files_exist(page: str):
    """Files of the repository that a page names by their path, and `make` targets."""
    names = re.findall(r"`([^`\n]+)`", FENCED.sub("", PAGES[page]))
    folders = r"(zaya_jax|tests|configs|pallas_kernels|launch)/[a-z0-9_./-]+"
    paths = [name for name in names if re.fullmatch(folders, name)]
    assert [path for path in paths if not (ROOT / path).exists()] == []
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert {name.split()[1] for name in names if re.match(r"make [a-z]", name)} <= set(targets)


AMD = re.compile(r"\bMI3\d\dX\b", re.IGNORECASE)
RANGE = re.compile(r"\d to \d|\bfrom\b|\bfast ends?\b|\branges?\b")  # or its fast end, which is called that
TIMED_HERE = re.compile("compiled in|compiling")


def test_what_is_predicted_for_a_device_that_nobody_has_measured_is_a_range():
    """Seconds, and what is per second, of the AMD GPUs without recorded rates: in tables and in sentences."""
    rates = ROOT / "zaya_jax/lab/predict/calibrations"
    measured = [path.stem for path in rates.iterdir()]
    assert "h200" in measured
    single, seen = [], 0

    def check(page: str, about: str, text: str) -> None:
        nonlocal seen
        if not TIMED_HERE.search(text) and any(name.lower() not in measured for name in AMD.findall(about)):
            seen += 1
            if not RANGE.search(text):
                single.append((page, text))

    for page, text in PAGES.items():
        if page == "docs/reference.md":  # which quotes what others have measured
            continue
        for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
            heads, _, *rows = [line.strip("| \n").split(" | ") for line in table.splitlines()]
            for row in rows:
                for head, cell in zip(heads, row, strict=False):
                    if re.search(r"\((s|ms)\)|\bstep, |tokens/s|MFU", head) and re.search(r"\d", cell):
                        check(page, " ".join((head, *row)), f"{head}: {cell}")
        prose = re.sub(r"^\|.*$", "", FENCED.sub("", text), flags=re.MULTILINE)
        for sentence in re.split(r"(?<=[.:])\s|\n\n|\n- ", prose):
            if re.search(r"\d (?:m?s|% MFU)\b", sentence):
                check(page, sentence, sentence)
    assert seen > 20
    assert single == []
