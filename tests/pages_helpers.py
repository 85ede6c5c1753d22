"""The README and the pages of docs/, as text."""

import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
}


def fenced(text: str) -> list[tuple[str, str]]:
    """Return the language and the content of each fenced block of a page, in order."""
    blocks = re.findall(r"^( *)```([^\n`]*)\n(.*?)^\1```$", text, re.MULTILINE | re.DOTALL)
    return [(language, textwrap.dedent(block)) for _, language, block in blocks]


def shell_blocks(text: str) -> list[str]:
    """Return the blocks of a page that hold commands of a shell."""
    return [block for language, block in fenced(text) if language in ("bash", "sh")]
