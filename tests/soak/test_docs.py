"""Every command that a laptop can run, of the README and then of the pages, pasted twice in order into a new clone."""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.pages_helpers import fenced
from tests.train_helpers import ROOT

# Blocks of ```sh, and the pages on clusters, GPUs and kernels, want what a laptop does not have.
# Other pages repeat commands of these.
PAGES = ("README.md", "docs/training.md", "docs/report.md", "docs/data.md", "docs/checkpoints.md", "docs/interop.md",
         "docs/finetune.md", "docs/generate.md", "docs/evaluate.md", "docs/inspect.md", "docs/parallel.md",
         "docs/troubleshooting.md", "docs/aegis.md", "docs/index.md", "docs/install.md", "docs/configuration.md",
         "docs/start/newcomer.md", "docs/start/operating.md", "docs/start/research.md",
         "docs/start/serving.md")  # fmt: skip
# Tested elsewhere (`make test` runs the tests), or hours long.
LEFT_OUT = re.compile(r"^(make test|python -m zaya_jax\.bench (ablations|balance|optimizer)\b).*$", re.MULTILINE)
# `make` would create another virtual environment; `checkpoint diff` exits with 1 if checkpoints differ, which is right.
SHELL = """set -e
make() { test "$1" = train && python -m zaya_jax.main --config configs/tiny.yaml; }
python() { command python "$@" || { status=$?; [[ "$3" == diff && $status == 1 ]]; }; }
"""


def scripts(page: str) -> list[tuple[str, str]]:
    """The shell and Python blocks of a page, in order: language and text. Python is pasted into one interpreter."""
    text, blocks, python = (ROOT / page).read_text(encoding="utf-8"), [], ""
    for language, block in fenced(text):
        python += block if language == "python" else ""
        if language in ("bash", "python"):
            blocks.append((language, python if language == "python" else LEFT_OUT.sub("", block)))
    return blocks


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The tracked files, and the environment that the tests run in."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name, follow_symlinks=False)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    return tmp_path


@pytest.mark.soak
def test_what_is_pasted_in_order_works_twice(clone: Path):
    environment = {**os.environ, "PYTHONPATH": str(clone), "PATH": f"{clone}/.venv/bin:{os.environ['PATH']}"}
    environment.pop("XLA_FLAGS", None)  # as users compile
    failed = []  # all of them are shown at the end: the next run is an hour away
    for page in PAGES:
        for language, block in scripts(page):
            for turn in ("first", "second"):
                start = time.monotonic()
                command = [sys.executable, "-c", block] if language == "python" else ["bash", "-c", SHELL + block]
                done = subprocess.run(command, cwd=clone, env=environment, text=True, capture_output=True, check=False)
                print(f"{page}, {turn} time, {time.monotonic() - start:.0f} s: {block.splitlines()[0]}", flush=True)
                if done.returncode or "Traceback" in done.stderr:
                    failed.append(f"{page}, {turn} time:\n{block}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
                    print(failed[-1], flush=True)
    assert not failed, "\n\n".join(failed)
