"""Create, replace, append to and delete files where other users can prepare names: the only module that does so.

Others can foretell most names in a run folder, a cache or an export, and put links, pipes, files or folders there.
"Share a run folder" in docs/cluster.md lists what is accepted. In a folder that its group may write, a file may belong
to anybody, because only members of the group could put it there.

A file is this user's if new files of this user get the same owner: a file server may map this user to another one.

Every path is walked from its start with one descriptor a folder, so renaming a folder meanwhile changes nothing.
"""

import contextlib
import errno
import grp
import os
import pwd
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from zaya_jax.errors import printable

PARTIAL = re.compile(r".*\.[0-9a-f]{16}\.partial", re.DOTALL)  # the name of a file that `new_file` is writing
_ANY = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_MOST_LINKS = 40  # in a path, as in Linux


def resolved(path: Path) -> Path:
    """Return an absolute path without links; raises `PermissionError` if another user placed one of them."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), _opened(path, path):
        pass
    return path.resolve()


def make_folder(path: Path) -> None:
    """Create a folder and those above it, unless they exist; never a link's target, and not beyond another user's."""
    with _opened(path, path, create=0o777):
        pass


@contextlib.contextmanager
def new_folder(path: Path, partial: Path) -> Iterator[None]:
    """Create the folder `partial`, which takes the name `path` at the end of the block, and is removed after an error.

    An old `partial` is removed first; `path` must not exist, or be an empty folder.
    """
    remove(partial)
    hidden_folder(partial)
    try:
        yield
        share(partial)
        rename(partial, path)
    finally:
        remove(partial, ignore_errors=True)


def hidden_folder(path: Path) -> None:
    """Create a folder that only this user may enter until `share`, so that a library can write there by names."""
    with _opened(path.parent, path, create=0o777) as parent:
        os.mkdir(path.name, 0o700, dir_fd=parent)


@contextlib.contextmanager
def private_folder(path: Path, *, by_name: bool = False) -> Iterator[Path]:
    """Create or open a folder that this user alone may write, and yield a path to it that renaming does not change.

    If it is used `by_name`, too, only this user may enter the folders above it that are created. `PermissionError` if
    at `path` is a link, or anything that others own or may write.
    """
    with _opened(path.parent, path, create=0o700 if by_name else 0o777) as parent:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path.name, 0o700, dir_fd=parent)
        folder = os.open(path.name, _ANY, dir_fd=parent)
    with _closing(folder):
        status = os.fstat(folder)
        if not stat.S_ISDIR(status.st_mode) or status.st_mode & 0o022 or not _is_mine(status.st_uid, folder):
            raise _refusal(path, status, "a folder of yours, and no link, that nobody else can write")
        yield Path(f"/proc/self/fd/{folder}")


def replaceable_at(path: Path) -> Path | None:
    """Return a folder in which others can replace what is on the way to `path`; None if there is none."""
    for folder in (*path.absolute().parents, *path.resolve().parents):
        status = folder.stat()
        by_group = status.st_mode & stat.S_IWGRP and not _is_own_group(status.st_gid)
        if (by_group or status.st_mode & stat.S_IWOTH) and not status.st_mode & stat.S_ISVTX:
            return folder
    return None


def _is_own_group(group: int) -> bool:
    """Return whether only this user, or root, is in a group: by its name, as many systems have one for each user."""
    with contextlib.suppress(KeyError):
        return group in (0, os.geteuid()) or grp.getgrgid(group).gr_name == pwd.getpwuid(os.geteuid()).pw_name
    return False


@contextlib.contextmanager
def new_file(path: Path, mode: int = 0o666, *, sync: bool = True) -> Iterator[IO[bytes]]:
    """Yield a file that takes the name `path`, in an existing folder, at the end of the block.

    Readers see either the old or the new content. After an error the old content stays. The umask limits `mode`;
    `sync` waits until the content is on disk.
    """
    part = f"{path.name[:25]}.{secrets.token_hex(8)}.partial"  # a name has at most 255 bytes, and a character up to 4
    with _opened(path.parent, path) as folder:
        file = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode, dir_fd=folder)
        try:
            with open(file, "w+b") as content:
                yield content
                content.flush()
                if sync:
                    os.fsync(file)
            os.replace(part, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(part, dir_fd=folder)


def open_file(path: Path, flags: int, mode: int = 0o666) -> int:
    """Open a file to append to it or lock it, and create it if it is missing; return its descriptor.

    `PermissionError` if at `path` is a link, or anything else that another user may have prepared.
    """
    with _opened(path.parent, path) as folder:
        try:
            file, is_new = os.open(path.name, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode, dir_fd=folder), True
        except FileExistsError:
            file, is_new = os.open(path.name, _ANY, dir_fd=folder), False  # which does not open a pipe or a device yet
        with _closing(file):
            status = os.fstat(file)
            is_plain = stat.S_ISREG(status.st_mode) and status.st_nlink < 2
            if not is_new and not (is_plain and _is_trusted(status, folder)):
                raise _refusal(path, status, "a regular file of yours with one hard link")
            return os.open(f"/proc/self/fd/{file}", flags | os.O_CLOEXEC)


def require_trusted(path: Path) -> None:
    """Raise `PermissionError` unless what is at `path` belongs to this user, to root, or to the team of its folder."""
    with _opened(path.parent, path) as folder:
        status = os.stat(path.name, dir_fd=folder, follow_symlinks=False)
        if not _is_trusted(status, folder):
            raise _refusal(path, status, "yours")


def _is_trusted(status: os.stat_result, folder: int) -> bool:
    place = os.fstat(folder)
    team = not place.st_mode & stat.S_IWOTH and (place.st_mode & stat.S_IWGRP or status.st_uid == place.st_uid)
    return bool(team) or status.st_uid == 0 or _is_mine(status.st_uid, folder)


def _is_mine(owner: int, folder: int) -> bool:
    """Return whether files of this user in a folder belong to `owner`, to whom a file server may map this user."""
    if owner == os.geteuid():
        return True
    name = f"owner.{secrets.token_hex(8)}.partial"
    with contextlib.suppress(OSError), _closing(os.open(name, os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder)) as file:
        os.unlink(name, dir_fd=folder)
        return os.fstat(file).st_uid == owner
    return False


def rename(path: Path, target: Path) -> None:
    """Rename a file or a folder; replaces a file or an empty folder at `target`."""
    with _opened(path.parent, path) as folder, _opened(target.parent, target) as new:
        os.rename(path.name, target.name, src_dir_fd=folder, dst_dir_fd=new)


def share(path: Path) -> None:
    """Give a folder the permissions of a new one, unless the file system refuses that."""
    with _opened(path, path) as folder:
        plain = secrets.token_hex(8)  # a new folder tells the umask and default ACLs; not every /proc tells the umask
        os.mkdir(plain, dir_fd=folder)
        mode = stat.S_IMODE(os.stat(plain, dir_fd=folder).st_mode)
        os.rmdir(plain, dir_fd=folder)
        with contextlib.suppress(OSError):
            os.chmod(f"/proc/self/fd/{folder}", mode)


def remove(path: Path, *, ignore_errors: bool = False) -> None:
    """Remove a file, a link (not its target) or a folder with its content, if it exists."""
    with contextlib.suppress(OSError if ignore_errors else FileNotFoundError), _opened(path.parent, path) as folder:
        if stat.S_ISDIR(os.stat(path.name, dir_fd=folder, follow_symlinks=False).st_mode):
            shutil.rmtree(path.name, ignore_errors, dir_fd=folder)
        else:
            os.unlink(path.name, dir_fd=folder)


def remove_partials(folder: Path) -> None:
    """Remove what processes that were killed were writing in a folder, in which nobody else writes now."""
    for name in filter(PARTIAL.fullmatch, os.listdir(folder)):
        remove(folder / name, ignore_errors=True)


@contextlib.contextmanager
def _opened(folder: Path, path: Path, *, create: int = 0) -> Iterator[int]:
    """Yield a descriptor of a folder; put `path` into errors of the block that name no path."""
    try:
        descriptor = _open(folder, create)
        with _closing(descriptor):
            yield descriptor
    except OSError as error:
        if os.sep not in str(error.filename) and (error.filename or error.errno != errno.EPERM):  # no refusal
            error.filename, error.filename2 = str(path), None
        raise


def _open(path: Path, create: int, links: int = 0) -> int:
    """Return a descriptor of a folder; those of `path` that are missing get the mode `create`, but never a link's."""
    if path.parent in (path, Path("/proc/self/fd")):  # "/", "." or what `private_folder` yields
        return os.open(path, _FOLDER)
    name, here = path.name, _open(path.parent, create, links)
    with _closing(here):
        if create and not os.access(name, os.F_OK, dir_fd=here, follow_symlinks=False):
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, create, dir_fd=here)
        try:
            return os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=here)
        except NotADirectoryError:
            with _closing(os.open(name, _ANY, dir_fd=here)) as link:
                status, place = os.fstat(link), os.fstat(here)
                if stat.S_ISLNK(status.st_mode) and links < _MOST_LINKS:
                    is_private = status.st_uid == place.st_uid and not place.st_mode & 0o022
                    target = path.parent / os.readlink("", dir_fd=link)
                    if is_private or status.st_uid == 0 or _is_mine(status.st_uid, here):
                        return _open(target, 0, links + 1)
                    remedy = f"Name {printable(str(target))} itself if you trust it"
                    raise _refusal(path, status, "a folder, or a link of yours", remedy) from None
    code = errno.ELOOP if stat.S_ISLNK(status.st_mode) else errno.ENOTDIR
    raise OSError(code, os.strerror(code))


@contextlib.contextmanager
def _closing(descriptor: int) -> Iterator[int]:
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _refusal(path: Path, status: os.stat_result, must: str, remedy: str = "Remove it") -> PermissionError:
    owner = f"{status.st_uid} ({stat.filemode(status.st_mode)}, hard links: {status.st_nlink})"
    is_backup = stat.S_ISREG(status.st_mode) and status.st_nlink > 1 and status.st_uid == os.geteuid()
    remedy = "Replace it by a copy" if is_backup else remedy
    text = f"{printable(str(path))} belongs to user {owner}, but must be {must}. {remedy}, or choose another folder"
    return PermissionError(errno.EPERM, text)
