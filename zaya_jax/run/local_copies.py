"""Copies of the newest checkpoint's arrays on a node, in files that are named for what they contain.

    LOCAL_DIR/RUN/STEP/PART

A part is a slice of an array of which the checkpoint has the digest. Whoever reads a part compares the digest, so it
does not matter who has written a file, or whether all of it was written.
"""

import contextlib
import os
import re
from pathlib import Path

from zaya_jax.run.digests import digest
from zaya_jax.run.files import expanded
from zaya_jax.run.writing import private_folder, remove

_STEP = re.compile(r"\d+(\.partial)?")  # `.partial` is of earlier versions


def copies_folder(local_dir: str, checkpoints: Path) -> Path:
    """Return the folder for the copies of one run; `checkpoints` is its folder of checkpoints, without links."""
    return expanded(local_dir) / digest(str(checkpoints).encode(errors="surrogateescape"))[:12]


def part_file(name: str, span: str) -> str:
    """Return the name of the file with the slice `span` of the array `name`."""
    return digest(f"{name}[{span}]".encode())


def remove_other_steps(home: Path, step: int) -> None:
    """Remove all copies in the folder of a run but those of `step`."""
    for name in os.listdir(home):
        if _STEP.fullmatch(name) and name != str(step):
            remove(home / name, ignore_errors=True)


def remove_earlier_copies(home: Path) -> None:
    """Remove the folders RUN-PROCESS in which earlier versions kept the copies of each process."""
    for folder in home.parent.glob(f"{home.name}-*"):
        if folder.name.removeprefix(f"{home.name}-").isdecimal():
            with contextlib.suppress(OSError), private_folder(folder) as own:
                remove_other_steps(own, -1)
                folder.rmdir()
