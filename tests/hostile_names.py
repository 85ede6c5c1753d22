"""Names of files and folders that the file system takes and programs stumble over."""

import os

from hypothesis import strategies as st

# Signs of URLs, patterns, shells, YAML, pages and Windows, what looks like an escape, an option, a number
# or our own `hf:FOLDER` and `RUN@PHASE`, text that is no UTF-8, and text that runs from right to left.
_PIECES = [
    *"#?%&|\\*[]{}$~'\"<>;:!@^` \n\t\x1b=,-+",
    "%41",
    "..",
    "a",
    "é",
    "\u202e",
    "\udcff",
    ": ",
    " #",
    "null",
    "1e5",
    "@",
    "@train",
    "hf:",
    "[b]",
    "<b>",
    "é" * 120,
]

HOSTILE_NAMES = (
    st.lists(st.sampled_from(_PIECES), min_size=1, max_size=8)
    .map(lambda pieces: os.fsdecode(os.fsencode("".join(pieces))[:255]))
    .filter(lambda name: name not in {".", ".."})
)
