"""Paths for libraries that write them into URLs, split them, or take only UTF-8: tensorstore, Orbax, ArrayRecord."""

import fcntl
import functools
import os
import re
import resource
import zlib
from pathlib import Path

# Without what URLs, tensorstore or Orbax read as more than itself: `#`, `?`, `%`, `|`, `\`, bytes outside of UTF-8.
_PLAIN = re.compile(r"[\w./+,=@~-]*", re.ASCII)


def plain_path(folder: Path) -> Path:
    """Return an absolute path of letters, digits and a few signs: that of `folder`, or of a descriptor of this process.

    The descriptor is the same in all processes of a job, as Orbax wants, unless they have opened hundreds of files.
    `OSError` if the folder cannot be opened.
    """
    path = folder.resolve()
    is_plain = _PLAIN.fullmatch(str(path))
    return path if is_plain else Path(f"/proc/self/fd/{_descriptor(path, *path.stat()[1:3])}")


@functools.cache  # one for each inode, which is not used again while it is open; another may get its path
def _descriptor(path: Path, *_identity: int) -> int:
    opened, limit = os.open(path, os.O_PATH), min(1024, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    return fcntl.fcntl(opened, fcntl.F_DUPFD_CLOEXEC, limit // 2 + zlib.crc32(os.fsencode(path)) % (limit // 4))
