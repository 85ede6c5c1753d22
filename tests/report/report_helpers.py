"""Short real runs to report on, and a browser that says what it sees."""

import base64
import hashlib
import json
import random
import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import yaml

from tests.aegis.metrics_helpers import write_node
from tests.data_helpers import VOCAB, write_source
from tests.train_helpers import run_tree, small_run, trained
from zaya_jax.config import Config, load_config
from zaya_jax.train.report import report

CHROMIUM = Path("/usr/bin/chromium")


def train(config: Config) -> Path:
    """Train and return the run folder, with all that the command `zaya train` writes."""
    _, result = trained(config)
    report(config, result)
    return result.run_dir


def corpus_run(folder: Path) -> Path:
    """A run of one phase over text, which compressors read, too."""
    return train(small_run(folder, "train.log_every=1"))


def phased_run(folder: Path, name: str = "run") -> Path:
    """A run of two phases over two sources."""
    rng = random.Random(0)
    for source in ("web", "code"):
        train_part, heldout = ([[rng.randrange(1, VOCAB) for _ in range(60)] for _ in range(n)] for n in (80, 8))
        write_source(folder / source, train_part, heldout)
    tree = run_tree(folder, name)
    tree["data"] = {"sources": {source: {"path": str(folder / source)} for source in ("web", "code")}, "context": 32,
                    "cache_dir": str(folder / "cache")}  # fmt: skip
    tree["phases"] = [{"name": "wide", "tokens": 10 * 128, "schedule": {"warmup_tokens": 256}},
                      {"name": "narrow", "tokens": 8 * 128, "mixture": {"web": 3, "code": 1},
                       "schedule": {"shape": "linear", "final": 0.0}}]  # fmt: skip
    tree["train"]["log_every"] = 2
    tree["train"]["spike"] = {"window": 4, "threshold": 0.5}  # so low that steps are skipped
    tree["train"]["max_skipped_steps"] = 18
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return train(load_config(path))


def supervised(run: Path) -> Path:
    """The run with what supervisors of two nodes wrote."""
    write_node(run, state="ended", exit_code=0, why="finished", ranks=[])
    write_node(run, "node-1")
    return run


class Page(HTMLParser):
    """The tags of a page with their attributes, its headings, and the cells of its rows."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.rows: list[list[str]] = []
        self.headings: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag in ("h2", "h3"):
            self.headings.append("")

    def handle_data(self, data):
        tag = self.tags[-1][0] if self.tags else ""
        if tag in ("td", "th"):
            self.rows[-1][-1] += data.strip()
        if tag in ("h2", "h3"):
            self.headings[-1] += data.strip()

    def cells(self, label: str) -> list[str]:
        """The cells beside `label` in the table at the top."""
        return next(row[1:] for row in self.rows if row and row[0] == label)


# Added to a copy of the page, whose policy then allows it, too.
PROBE = """
const refused = [];
document.addEventListener("securitypolicyviolation", (event) => refused.push(event.blockedURI));
addEventListener("load", () => setTimeout(() => probe().catch((error) => {
  document.body.dataset.probe = JSON.stringify({ error: String(error) });
}), 500));
async function probe() {
  const plots = [...document.querySelectorAll(".plot")];
  const shown = (node) => { const box = node.getBoundingClientRect(); return box.width > 0 && box.height > 0; };
  const marks = "path.js-line, path.point, .bars path, .hm image, .heatmaplayer image";
  const drawn = (node) => node.tagName === "image" || node.getAttribute("d");
  const seen = plots.map((plot) => ({
    title: plot.getAttribute("aria-label"),
    marks: [...plot.querySelectorAll(marks)].filter(drawn).length,
    width: plot.getBoundingClientRect().width,
    drawn: plot.querySelector(".main-svg").getBoundingClientRect().width,
    area: plot._fullLayout._size.h,
    labels: [...plot.querySelectorAll(".xtitle, .ytitle")].filter(shown).length,
    xticks: [...plot.querySelectorAll(".xtick text")].map((node) => node.textContent),
    letters: [...plot.querySelectorAll("text")].map((node) => parseFloat(getComputedStyle(node).fontSize)),
  }));
  const sliders = plots.filter((plot) => plot.layout.sliders);
  const moved = [];
  for (const plot of sliders) {
    const before = JSON.stringify(plot.data[0].z);
    await Plotly.animate(plot, [plot.layout.sliders[0].steps[0].args[0][0]], plot.layout.sliders[0].steps[0].args[1]);
    moved.push(JSON.stringify(plot.data[0].z) !== before);
  }
  document.body.dataset.probe = JSON.stringify({
    plots: seen, refused, moved, loaded: performance.getEntriesByType("resource").map((entry) => entry.name),
    width: document.documentElement.scrollWidth, window: innerWidth,
    letters: [...document.querySelectorAll("body *")].map((node) => parseFloat(getComputedStyle(node).fontSize)),
  });
}
"""


def look(page: Path, width: int, folder: Path) -> dict[str, Any]:
    """Open the page in a browser `width` pixels wide, and return what its own DOM says."""
    digest = base64.b64encode(hashlib.sha256(PROBE.encode()).digest()).decode()
    text, count = re.subn("script-src ", f"script-src 'sha256-{digest}' ", page.read_text(encoding="utf-8"), count=1)
    assert count == 1
    copy = folder / "copy.html"
    copy.write_text(text.replace("<body>", f"<body><script>{PROBE}</script>"), encoding="utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
             "--disable-background-networking", "--disable-component-update", f"--user-data-dir={folder / 'user'}",
             f"--window-size={width},900", "--virtual-time-budget=20000"]  # fmt: skip
    done = subprocess.run([CHROMIUM, *flags, "--dump-dom", copy.as_uri()], capture_output=True, text=True, timeout=120,
                          stdin=subprocess.DEVNULL, check=True)  # fmt: skip
    body = next(attributes for tag, attributes in Page(done.stdout).tags if tag == "body")
    return json.loads(body["data-probe"])
