"""A temporary folder for tens of gigabytes, which does not stay when the part that made it is killed."""

import contextlib
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

# Waits until the process that made the folder has ended, and then a moment for its children to end. It is no child of
# that process, so whoever kills it with all its children does not kill this.
_REMOVE = 'exec 3<&0; (cat <&3; sleep 1; rm -rf -- "$1") >/dev/null 2>&1 &'


@contextlib.contextmanager
def temporary_folder(part: str) -> Iterator[Path]:
    """Make a folder for `part` that is removed at the end of the block, and also if this process is killed."""
    with tempfile.TemporaryDirectory(prefix=f"zaya-{part}-", ignore_cleanup_errors=True) as folder:
        command = ["sh", "-c", _REMOVE, "sh", folder]
        with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True):  # noqa: S603
            yield Path(folder)
