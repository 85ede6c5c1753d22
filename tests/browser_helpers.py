"""A browser that says what it sees of a page."""

import base64
import hashlib
import json
import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

CHROMIUM = Path("/usr/bin/chromium")


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


# Added to a copy of the page, whose policy then allows it, too. The copy is a frame, since windows have a least width.
# It looks before the frame has loaded for good, so that the browser, which then prints its page, needs no time limit.
PROBE = """
const refused = [];
document.addEventListener("securitypolicyviolation", (event) => refused.push(event.blockedURI));
addEventListener("load", () => {
  const plots = [...document.querySelectorAll(".plot")];
  const shown = (node) => { const box = node.getBoundingClientRect(); return box.width > 0 && box.height > 0; };
  const size = (node) => parseFloat(getComputedStyle(node).fontSize);
  const marks = "path.js-line, path.point, .bars path, .heatmaplayer image";
  const drawn = (node) => node.tagName === "image" || node.getAttribute("d");
  const seen = plots.map((plot) => ({
    title: plot.getAttribute("aria-label"),
    marks: [...plot.querySelector(".cartesianlayer").querySelectorAll(marks)].filter(drawn).length,
    width: plot.getBoundingClientRect().width,
    drawn: plot.querySelector(".main-svg").getBoundingClientRect().width,
    area: plot._fullLayout._size.h,
    labels: [...plot.querySelectorAll(".xtitle, .ytitle")].filter(shown).length,
    xticks: [...plot.querySelectorAll(".xtick text")].map((node) => node.textContent),
    letters: [...plot.querySelectorAll("text")].map(size),
    positions: plot.layout.sliders?.[0].steps.map((step) => plot._transitionData._frameHash[step.args[0][0]].data[0].z),
  }));
  const ends = () => [plots[0].data[0].x.at(-1), plots[0].layout.xaxis.title.text];
  const units = [ends()];
  for (const unit of ["tokens", "hours", "step"]) {
    const select = document.getElementById("unit");
    select.value = unit;
    select.dispatchEvent(new Event("change"));
    units.push(ends());
  }
  parent.document.body.dataset.probe = JSON.stringify({
    plots: seen, refused, units, loaded: performance.getEntriesByType("resource").map((entry) => entry.name),
    width: document.documentElement.scrollWidth, window: innerWidth,
    letters: [...document.querySelectorAll("body *")].map(size),
  });
});
"""

FRAME = """<!doctype html><body style="margin: 0">
<iframe src="copy.html" width="{width}" height="900" style="border: 0"></iframe></body>"""


def look(page: Path, width: int, folder: Path) -> dict[str, Any]:
    """Open the page in a browser `width` pixels wide, and return what its own DOM says."""
    digest = base64.b64encode(hashlib.sha256(PROBE.encode()).digest()).decode()
    text, count = re.subn("script-src ", f"script-src 'sha256-{digest}' ", page.read_text(encoding="utf-8"), count=1)
    assert count == 1
    copy = folder / "copy.html"
    copy.write_text(text.replace("<body>", f"<body><script>{PROBE}</script>"), encoding="utf-8")
    (folder / "frame.html").write_text(FRAME.replace("{width}", str(width)), encoding="utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
             "--disable-background-networking", "--disable-component-update",
             "--allow-file-access-from-files", f"--user-data-dir={folder / 'user'}",
             f"--window-size={max(width, 600)},900"]  # fmt: skip
    command = [CHROMIUM, *flags, "--dump-dom", (folder / "frame.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL, check=True)
    body = next(attributes for tag, attributes in Page(done.stdout).tags if tag == "body")
    return json.loads(body["data-probe"])
