"""Two users of one machine, and what one of them can prepare for the other."""

import contextlib
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

VICTIM, OTHER, TEAM = 20_001, 20_002, 20_003  # two users, and the group of both
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two other users")


@contextlib.contextmanager
def public_folder() -> Iterator[Path]:
    """A folder that other users may enter, unlike those of pytest."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@contextlib.contextmanager
def user(uid: int, groups: tuple[int, ...] = (TEAM,), mask: int = 0o002) -> Iterator[None]:
    """Be another user, with the group of the same number, for the duration of a block."""
    mask = os.umask(mask)
    os.setgroups(groups)
    os.setegid(uid)
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups([0])
        os.umask(mask)


def content(folder: Path) -> dict[str, tuple[int, int, str | bytes]]:
    """Everything in a folder: owner, permissions and content of each name."""
    tree = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        text = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else ""
        tree[str(path.relative_to(folder))] = (status.st_uid, stat.S_IMODE(status.st_mode), text)
    return tree


def make_home(home: Path) -> None:
    """A folder of the victim's, with files and folders whose names are those of checkpoints, too."""
    for name in ("thesis", "thesis/100", "thesis/1.g1"):
        (home / name).mkdir(parents=True)
        (home / name / "1").write_text("all of it")
    for path in (home, *home.rglob("*")):
        os.chown(path, VICTIM, VICTIM)


# What others can put at a path.
PLANTED: dict[str, Callable[[Path, Path], object]] = {
    "link to a file": lambda path, home: path.symlink_to(home / "thesis" / "1"),
    "link to a folder": lambda path, home: path.symlink_to(home / "thesis"),
    "link to nothing": lambda path, home: path.symlink_to(home / "new"),
    "link to itself": lambda path, home: path.symlink_to(path),
    "hard link": lambda path, home: os.link(home / "thesis" / "1", path),
    "pipe": lambda path, home: os.mkfifo(path, 0o666),
    "file": lambda path, home: path.write_text("theirs"),
    "folder": lambda path, home: (path.mkdir(0o777), (path / "1").write_text("theirs")),
    "folder with a link": lambda path, home: (path.mkdir(0o777), (path / "1").symlink_to(home / "thesis")),
}


def plant(kind: str, path: Path, home: Path) -> None:
    """Put something of another user at a path, as deep in a shared folder as that is."""
    hard = kind == "hard link"  # which the kernel does not allow to others, unless fs.protected_hardlinks is 0
    with user(OTHER, mask=0):
        path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.nullcontext() if hard else user(OTHER, mask=0):
        PLANTED[kind](path, home)
