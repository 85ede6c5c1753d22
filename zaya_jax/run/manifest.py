"""The manifest of a checkpoint: its files, arrays and metadata, written last."""

import contextlib
import dataclasses
import errno
import fnmatch
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zaya_jax.config import with_current_keys
from zaya_jax.errors import ExitCode, InputError, Reason
from zaya_jax.run.digests import Digests, digest, joined, read_slice
from zaya_jax.run.files import read_file, sync_folder, write_atomically

FORMAT = 1  # of checkpoints; newer ones are rejected
STATE = "state"  # folder of the arrays, written by Orbax
DIGESTS = "digests"  # folder of the digests, one file per process
_VALUES = f"{STATE}/ocdbt.process_"
_NAME = "manifest-{}.json"  # the name contains the digest of the content
_ON_DISK = {"metadata": "about", "fencing_token": "generation"}  # field → its name on disk
_TYPES = {"metadata": {dict}, "leaves": {dict}, "files": {dict}, "digests": {dict}}
_TYPES |= {"step": {int}, "fencing_token": {int}, "read_back": {bool}}
_METADATA_TYPES = {"config": {dict}, "environment": {dict}, "versions": {dict}, "phase": {str}, "tokens_seen": {int}}
_METADATA_TYPES |= {"heldout_loss": {int, float, type(None)}}


class Damaged(InputError):
    """The checkpoint is damaged; the message says which part."""


class Unreadable(InputError):
    """The checkpoint could not be read, but may be intact, also for the next attempt."""

    status = ExitCode.STOPPED
    reason = Reason.DISK


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The content and metadata of a checkpoint."""

    step: int  # number of steps that the run had done
    fencing_token: int  # token of the processes that saved it, see `fencing`; called `generation` on disk
    # `phase`, `first_step`, `batch`, `tokens_seen`, `data` (position), `heldout_loss`, `config`, `config_digest`,
    # `environment`, `versions`; called `about` on disk.
    metadata: dict[str, Any]
    # Array name → dtype, shape and digest; for a small array also its byte offset among the small ones (`at`).
    leaves: dict[str, dict[str, Any]]
    files: dict[str, int]  # path within the checkpoint → size in bytes, without the manifest
    # Path → digest, for files without array data: those in `digests/`, which contain the digests of all array parts,
    # and Orbax's index files. Empty if checkpoint.verify was none.
    digests: dict[str, str]
    read_back: bool  # whether all arrays were read back and compared before the manifest was written
    format: int = FORMAT


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest durably; it must be the last file of the checkpoint in `folder`."""
    tree = {_ON_DISK.get(key, key): value for key, value in dataclasses.asdict(manifest).items()}
    text = json.dumps(tree, indent=1) + "\n"
    write_atomically(folder / _NAME.format(digest(text.encode())), text)
    sync_folder(folder)


def has_manifest(folder: Path) -> bool:
    """Return whether the checkpoint in `folder` is finished, or cannot be listed."""
    with contextlib.suppress(OSError):
        return bool(fnmatch.filter(list_names(folder), _NAME.format("*")))
    return True


def saved_at(folder: Path) -> float | None:
    """Return when the checkpoint in `folder` was finished, in seconds since the epoch; None if it is not."""
    return next((path.stat().st_mtime for path in folder.glob(_NAME.format("*"))), None)


def try_read(folder: Path) -> Manifest | None:
    """Read the manifest without checking the files; None if it is damaged or missing, `InputError` otherwise."""
    try:
        return read_manifest(folder, check_files=False)
    except Damaged:
        return None


def read_manifest(folder: Path, *, check_files: bool = True) -> Manifest:
    """Read the manifest of the checkpoint in `folder`; check the sizes of its files and the content of its digests.

    `Damaged` if the manifest is missing or altered, or a file is missing, altered or of another size; `InputError` if
    the format is newer, or a file cannot be read.
    """
    manifest = _read(folder)
    for name, size in manifest.files.items() if check_files else ():
        path = folder / name
        with _reading(path):
            there = path.stat()
        if not stat.S_ISREG(there.st_mode):
            raise Damaged(f"{path} is not a file.")
        if there.st_size != size:
            raise Damaged(f"{path} has {there.st_size} bytes, but must have {size}.")
    for name, text in manifest.digests.items() if check_files else ():
        if digest(_bytes(folder / name)) != text:
            raise Damaged(f"{folder / name} does not match its checksum.")
    return manifest


def _read(folder: Path) -> Manifest:
    with _reading(folder):
        paths = sorted(folder / name for name in fnmatch.filter(list_names(folder), _NAME.format("*")))
    if len(paths) != 1:
        raise Damaged(f"{folder} contains {len(paths)} manifests, but must contain one.")
    content = _bytes(paths[0])
    if paths[0].name != _NAME.format(digest(content)):
        raise Damaged(f"{paths[0]} does not match its checksum.")
    try:
        tree = json.loads(content)
        if tree["format"] <= FORMAT:
            renamed = {key: with_current_keys(tree.pop(name)) for key, name in _ON_DISK.items()}
            return _checked(Manifest(**renamed, **tree))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise Damaged(f"{paths[0]} is not a checkpoint manifest: {str(error)[:200]}.") from error
    newer = f"{folder} is a checkpoint of format {tree['format']}, but this zaya_jax reads formats up to {FORMAT}"
    raise InputError(f"{newer}; install a newer version.")


def _checked(manifest: Manifest) -> Manifest:
    """Check types, since a hostile file can have a matching digest; ValueError if one is not the expected one."""
    for tree, types in ((vars(manifest), _TYPES), (manifest.metadata, _METADATA_TYPES)):
        for key in types.keys() & tree.keys():
            if type(tree[key]) not in types[key]:
                raise ValueError(f"its {key} has type {type(tree[key]).__name__}")
    for name, leaf in manifest.leaves.items():
        shape = leaf.get("shape") if isinstance(leaf, dict) else None
        sizes = isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)
        if not sizes or not isinstance(leaf.get("dtype"), str):
            raise ValueError(f"the array {name:.100} has no dtype and shape")
    for name, size in manifest.files.items():
        if type(size) is not int or Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"it lists the file {name!r:.100} with {size!r:.100} bytes")
    for name, text in manifest.digests.items():
        if name not in manifest.files or not isinstance(text, str):
            raise ValueError(f"it has a digest of {name!r:.100}, but does not list that file")
    return manifest


def read_digests(folder: Path, manifest: Manifest, reader: int = 0, readers: int = 1) -> Digests:
    """Read the digests of the array parts that a reader must check; empty if the checkpoint has none.

    Reader i checks what process i saved, because with an unchanged layout it holds those parts.
    """
    try:
        files = sorted((name for name in manifest.digests if name.startswith(f"{DIGESTS}/")), key=_process)
        digests = joined(json.loads(_bytes(folder / name)) for name in files if _process(name) % readers == reader)
        for span in (span for parts in digests.values() for span in parts):
            read_slice(span)
    except InputError:
        raise
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"{folder / DIGESTS} does not contain checkpoint digests: {str(error)[:200]}.") from error
    return digests


def _process(name: str) -> int:
    return int(Path(name).stem.rpartition("_")[2])


def file_digests(folder: Path) -> dict[str, str]:
    """Return path → digest for the files of a checkpoint that contain no array data.

    Array data is in `state/ocdbt.process_…`; its digests come from memory, not from files.
    """
    return {name: digest((folder / name).read_bytes()) for name in list_files(folder) if not name.startswith(_VALUES)}


def list_names(folder: Path) -> list[str]:
    """List the names in a folder; none if it does not exist. Unlike `Path.glob`, this raises any other `OSError`.

    A link whose target is gone, perhaps with a mount, is no missing folder.
    """
    try:
        return os.listdir(folder)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG):
            raise
        if os.path.islink(folder):
            raise OSError(errno.ESTALE, "the target of this link is gone", str(folder)) from error
    return []


def list_files(folder: Path) -> dict[str, int]:
    """Return path → size in bytes for all files of a checkpoint."""
    files = filter(Path.is_file, sorted(folder.rglob("*")))
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}


def _bytes(path: Path) -> bytes:
    with _reading(path):
        return read_file(path)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Raise `Damaged` if `path` is missing, and `Unreadable` for all else that the system says."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as error:
        raise Damaged(f"{path} is missing.") from error
    except OSError as error:
        raise Unreadable(f"{path} cannot be read: {error.strerror}. The checkpoint may be intact.") from error
