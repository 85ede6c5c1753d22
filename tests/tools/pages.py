"""Rerun the commands whose output a page shows, and rewrite the output: `make pages`.

A block of ```text that follows a block of commands shows what these print; `...` stands for lines that are left out.
All commands of a page run, in order, in a new clone, those of the README first. Each line becomes the line of the new
output that has its form, which is the line without its numbers; a line without such, as of a model's text, becomes the
one at its place. Pictures are of the README's run, those of its report by Chromium. docs/outputs.json records when each
block and picture was made, by which versions, and its digest, by which a test finds what was changed by hand.
"""

import argparse
import dataclasses
import datetime
import difflib
import hashlib
import itertools
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from tests.browser_helpers import CHROMIUM

ROOT = Path(__file__).parent.parent.parent
RECORD = ROOT / "docs" / "outputs.json"
# The README first, whose runs the others use.
PAGES = (
    "README.md", "docs/install.md", "docs/data.md", "docs/evaluate.md", "docs/parallel.md", "docs/machine.md",
    "docs/aegis.md", "docs/configuration.md",
)  # fmt: skip
RUN = "runs/tiny"  # of the README
# Pictures of the report of that run: height in pixels, and the style that hides the rest of the page, except the svg in
# which Plotly measures texts.
_ROUTING = "body > :not(svg, .routing), .routing > :nth-child(-n + 6) { display: none }"
REPORTS = {"docs/report.png": (1160, ""), "docs/report_routing.png": (980, _ROUTING)}
PICTURES = ("docs/loss.png", *REPORTS)
# Tested elsewhere (`make test` runs the tests), hours long, or what this environment has already.
_LEFT_OUT = re.compile(r"^(make test|python -m venv|\S*pip install|python -m benchmarks ablations)\b.*$", re.MULTILINE)
# `make` would create another virtual environment; `checkpoint diff` exits with 1 if checkpoints differ, and
# `doctor` if a device is slow, which is right.
SHELL = """set -e
make() { test "$1" = train && python -m zaya_jax.main --config configs/tiny.yaml; }
python() { command python "$@" || { status=$?; [[ "$3" =~ ^(diff|doctor)$ && $status == 1 ]]; }; }
"""
_BLOCK = re.compile(r"^( *)```([^\n`]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_NUMBER = re.compile(r"\d[\d,_]*(\.\d+)?(e[+-]?\d+)?")
_GAP = "..."


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block of a page: its language, text and place. Python includes the page's Python before it."""

    language: str
    text: str
    start: int
    end: int

    def command(self, python: str = "") -> list[str]:
        """The command that runs the block; `python` is what the page ran before in the same interpreter."""
        if self.language == "python":
            return [sys.executable, "-c", python + self.text]
        return ["bash", "-c", SHELL + _LEFT_OUT.sub("", self.text)]

    @property
    def title(self) -> str:
        """The last command that runs."""
        return _LEFT_OUT.sub("", self.text).strip().splitlines()[-1]


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a page, in order."""
    return [
        Block(found[2], textwrap.dedent(found[3]) if found[1] else found[3], found.start(3), found.end(3))
        for found in _BLOCK.finditer(text)
    ]


def shown(text: str) -> Iterator[tuple[Block, Block]]:
    """The pairs of a block of commands and the output that a page shows after it."""
    found = blocks(text)
    for commands, output in itertools.pairwise(found):
        if output.language == "text" and commands.language in ("bash", "sh", "python"):
            yield commands, output


def form(line: str) -> str:
    """A line without its numbers and the widths of its columns."""
    return re.sub(r"[ ─-]+", " ", _NUMBER.sub("0", line)).strip()


def align(shown: list[str], printed: list[str]) -> list[int | None]:
    """For each shown line, the printed line that it stands for; None for `...`, and for free text.

    That is the next line if it has the same form. At the beginning and after `...` it is the later line of that form
    after which most of the next shown lines follow in their form, too, and of these the most similar one.
    """
    forms, places, cursor, after_gap = [form(line) for line in printed], [], 0, True
    for index, line in enumerate(shown):
        places.append(None)
        if line.strip() == _GAP:
            after_gap = True
            continue
        found = [place for place in range(cursor, len(printed)) if forms[place] == form(line)]
        if not after_gap:
            found = [place for place in found if place == cursor]
        if found:
            together = [form(each) for each in itertools.takewhile(lambda each: each.strip() != _GAP, shown[index:])]
            alike = {place: sum(map(str.__eq__, together, forms[place:])) for place in found}
            found = [place for place in found if alike[place] == max(alike.values())]
            places[-1] = max(found, key=lambda place: difflib.SequenceMatcher(None, line, printed[place]).ratio())
        cursor, after_gap = (places[-1] if found else cursor) + 1, False
    return places


def rewritten(shown: str, printed: str) -> str:
    """The shown lines with the numbers and the free text of what was printed."""
    old, new = shown.splitlines(), printed.splitlines()
    result, cursor = [], 0
    for line, place in zip(old, align(old, new), strict=True):
        if line.strip() == _GAP:
            result.append(line)
            continue
        cursor = cursor if place is None else place
        result += new[cursor : cursor + 1]
        cursor += 1
    return "\n".join(line.rstrip() for line in result) + "\n"


def differences(shown: str, printed: str, tolerance: float) -> list[str]:
    """The shown lines that were not printed in this form, or with a number that is off by more than `tolerance`."""
    old, new, wrong = shown.splitlines(), printed.splitlines(), []
    for line, place in zip(old, align(old, new), strict=True):
        if line.strip() == _GAP:
            continue
        if place is None:
            wrong.append(f"not printed: {line}")
            continue
        for before, after in zip(_NUMBER.finditer(line), _NUMBER.finditer(new[place]), strict=True):
            a, b = (float(re.sub("[,_]", "", number[0])) for number in (before, after))
            if abs(a - b) > tolerance * max(abs(a), abs(b)):
                wrong.append(f"{before[0]} is {after[0]}: {line}")
    return wrong


def clone(folder: Path) -> Path:
    """Copy the tracked files into `folder`, beside the environment that this runs in."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name, follow_symlinks=False)
    (folder / ".venv").symlink_to(sys.prefix)
    if (compilers := ROOT / ".venv-compilers").exists():
        (folder / ".venv-compilers").symlink_to(compilers)
    return folder


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command of a page in the clone `folder`, with both of its streams in one."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "PATH": f"{folder}/.venv/bin:{os.environ['PATH']}"}
    for name in ("XLA_FLAGS", "JAX_PLATFORMS"):  # as users run it
        environment.pop(name, None)
    both = subprocess.PIPE, subprocess.STDOUT
    return subprocess.run(command, cwd=folder, env=environment, text=True, check=False, stdout=both[0], stderr=both[1])


def anonymous(text: str, folder: Path) -> str:
    """What a command printed, without the names of this machine."""
    for name, public in (
        (str(folder), "/home/me/zaya_jax"),
        (str(Path.home()), "/home/me"),
        (socket.gethostname(), "host"),
    ):
        text = text.replace(name, public)
    return text


def digest(shown: str | bytes) -> str:
    """The digest of a shown output, or of a picture."""
    return hashlib.sha256(shown.encode() if isinstance(shown, str) else shown).hexdigest()[:16]


def draw(report: Path, picture: Path, height: int, style: str) -> None:
    """Draw the report of a run, with the other style, as a browser shows it 900 pixels wide."""
    text = re.sub(r'<section (id="[^"]*">\s*<h2>Routing)', r'<section class="routing" \1', report.read_text("utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        (page := Path(folder) / "report.html").write_text(
            text.replace("</head>", f"<style>{style}</style></head>"), "utf-8"
        )
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=10000"]
        flags += [f"--user-data-dir={folder}/user", f"--window-size=900,{height}", f"--screenshot={picture}"]
        subprocess.run([CHROMIUM, *flags, page.as_uri()], check=True, capture_output=True, timeout=120)


def remake_pictures(run_dir: Path, root: Path = ROOT) -> dict[str, str]:
    """Draw the pictures again from a run with its report, and return their digests."""
    shutil.copy(run_dir / "loss.png", root / PICTURES[0])
    for picture, (height, style) in REPORTS.items():
        draw(run_dir / "report.html", root / picture, height, style)
    return {picture: digest((root / picture).read_bytes()) for picture in PICTURES}


def remake(page: str, folder: Path) -> list[dict[str, str | float]]:
    """Run the commands of a page up to its last output, rewrite it, and return the records of its outputs."""
    text = (ROOT / page).read_text(encoding="utf-8")
    outputs = {commands.start: output for commands, output in shown(text)}
    pieces, end, python, records = [], 0, "", []
    for block in blocks(text):
        if block.start > max(outputs):
            break
        if block.language not in ("bash", "python") and block.start not in outputs:
            continue
        start = time.monotonic()
        done = run(block.command(python), folder)
        python += block.text if block.language == "python" else ""
        seconds = time.monotonic() - start
        print(f"{page}, {seconds:.0f} s: {block.title}", flush=True)
        if done.returncode:
            raise SystemExit(
                f"{page}: this block ended with status {done.returncode}:\n{block.text}\n{done.stdout[-4000:]}"
            )
        if output := outputs.get(block.start):
            new = rewritten(output.text, anonymous(done.stdout, folder))
            pieces += [text[end : output.start], new]
            end = output.end
            records.append({"command": block.title, "seconds": round(seconds), "digest": digest(new)})
    (ROOT / page).write_text("".join([*pieces, text[end:]]), encoding="utf-8")
    return records


def main() -> None:
    """Rewrite the pages that are named, or all."""
    parser = argparse.ArgumentParser(prog="make pages", description="Rerun the commands whose output the pages show.")
    parser.add_argument(
        "pages", nargs="*", default=PAGES, help="pages (default: all); others use the runs of README.md"
    )
    pages = parser.parse_args().pages
    made = {"date": datetime.datetime.now(datetime.UTC).date().isoformat(), "python": platform.python_version()}
    made |= {name: version(name) for name in ("zaya-jax", "jax")}
    record = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    if "README.md" in pages and not CHROMIUM.exists():
        raise SystemExit(f"README.md has pictures, which {CHROMIUM} draws, but it is missing (Debian: chromium).")
    with tempfile.TemporaryDirectory() as folder:
        clone(here := Path(folder))
        for page in pages:
            record[page] = {**made, "outputs": remake(page, here)}
            if page == "README.md":
                record[page]["pictures"] = remake_pictures(here / RUN)
            RECORD.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
