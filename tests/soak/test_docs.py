"""Every command that a laptop can run, of the README and then of the pages, pasted twice in order into a new clone."""

import time
from pathlib import Path

import pytest

from tests.pages_helpers import PAGES as TEXTS
from tests.tools import pages

# Blocks of ```sh, and the pages on clusters, GPUs and kernels, want what a laptop does not have.
# Other pages repeat commands of these.
PAGES = ("README.md", "docs/training.md", "docs/report.md", "docs/data.md", "docs/checkpoints.md", "docs/interop.md",
         "docs/finetune.md", "docs/generate.md", "docs/evaluate.md", "docs/inspect.md", "docs/parallel.md",
         "docs/troubleshooting.md", "docs/aegis.md", "docs/index.md", "docs/install.md", "docs/configuration.md",
         "docs/start/newcomer.md", "docs/start/operating.md", "docs/start/research.md",
         "docs/start/serving.md")  # fmt: skip


@pytest.mark.soak
def test_what_is_pasted_in_order_works_twice(tmp_path: Path):
    failed = []  # all of them are shown at the end: the next run is an hour away
    clone = pages.clone(tmp_path)
    for page in PAGES:
        python = ""
        for block in pages.blocks(TEXTS[page]):
            if block.language not in ("bash", "python"):
                continue
            for turn in ("first", "second"):
                start = time.monotonic()
                done = pages.run(block.command(python), clone)
                print(f"{page}, {turn} time, {time.monotonic() - start:.0f} s: {block.title}", flush=True)
                if done.returncode or "Traceback" in done.stdout:
                    failed.append(f"{page}, {turn} time:\n{block.text}\n{done.stdout[-6000:]}")
                    print(failed[-1], flush=True)
            python += block.text if block.language == "python" else ""
    assert not failed, "\n\n".join(failed)
