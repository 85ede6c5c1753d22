"""The manifest of a checkpoint: what it consists of and what it is, written when all of it is there."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from zaya_jax.config import with_current_keys
from zaya_jax.errors import InputError
from zaya_jax.run.digests import Digests, digest, joined, read_slice
from zaya_jax.run.files import sync_folder, write_atomically

FORMAT = 1  # of checkpoints; a newer one is refused
STATE = "state"  # the folder of the arrays, which is Orbax's
DIGESTS = "digests"  # the folder of each process's digests
_VALUES = f"{STATE}/ocdbt.process_"
_NAME = "manifest-{}.json"  # with the digest of its content
_ON_DISK = {"metadata": "about", "fencing_token": "generation"}  # fields that are called otherwise there
_TYPES = {"step": {int}, "fencing_token": {int}, "metadata": {dict}, "leaves": {dict}, "files": {dict},
          "digests": {dict}, "read_back": {bool}}  # fmt: skip
_METADATA_TYPES = {"config": {dict}, "environment": {dict}, "versions": {dict}, "phase": {str}, "tokens_seen": {int},
                   "heldout_loss": {int, float, type(None)}}  # fmt: skip


class Damaged(InputError):
    """A checkpoint is damaged: the message says which part."""


class Unreadable(InputError):
    """The checkpoint could not be read, which does not mean that it is damaged."""


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a checkpoint is.

    Attributes:
      step: of the run.
      fencing_token: of the processes that saved it, see `fencing`; called `generation` on disk.
      metadata: `phase`, `first_step`, `batch`, `tokens_seen`, `data` (position), `heldout_loss`, `config`,
        `config_digest`, `environment`, `versions`; called `about` on disk.
      leaves: dtype, shape and digest of each array by name, and the offset of a small one among those (`at`, bytes).
      files: size in bytes of each file, by path within the checkpoint; this one is not among them.
      digests: of each file that holds no array: those in the folder `digests/`, which have the digest of each part of
        each array, and Orbax's own, by which it finds the arrays; none where they were not asked for.
      read_back: whether all arrays were read back and compared before it was written.
    """

    step: int
    fencing_token: int
    metadata: dict[str, Any]
    leaves: dict[str, dict[str, Any]]
    files: dict[str, int]
    digests: dict[str, str]
    read_back: bool
    format: int = FORMAT


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write it, durably, as the last file of the checkpoint in `folder`."""
    tree = {_ON_DISK.get(key, key): value for key, value in dataclasses.asdict(manifest).items()}
    text = json.dumps(tree, indent=1) + "\n"
    write_atomically(folder / _NAME.format(digest(text.encode())), text)
    sync_folder(folder)


def has_manifest(folder: Path) -> bool:
    """Whether the checkpoint in `folder` was finished."""
    return any(folder.glob(_NAME.format("*")))


def try_read(folder: Path) -> Manifest | None:
    """The manifest of the checkpoint in `folder`, without a look at its files; None where it cannot be used."""
    try:
        return read_manifest(folder, check_files=False)
    except InputError:
        return None


def read_manifest(folder: Path, *, check_files: bool = True) -> Manifest:
    """The manifest of the checkpoint in `folder`, and its files compared by name and size, its digests by content.

    Raises:
      Damaged: there is none, or it is not what was written, or a file is missing or of another size.
      InputError: it is of a newer format, or cannot be read.
    """
    manifest = _read(folder)
    if not check_files:
        return manifest
    for name, size in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise Damaged(f"{path} is missing.")
        if path.stat().st_size != size:
            raise Damaged(f"{path} has {path.stat().st_size} bytes, but {size} were written.")
    for name, text in manifest.digests.items():
        if digest(_bytes(folder / name)) != text:
            raise Damaged(f"{folder / name} is not what was written.")
    return manifest


def _read(folder: Path) -> Manifest:
    paths = sorted(folder.glob(_NAME.format("*")))
    if len(paths) != 1:
        raise Damaged(f"{folder} holds {len(paths)} manifests, where a checkpoint has one.")
    content = _bytes(paths[0])
    if paths[0].name != _NAME.format(digest(content)):
        raise Damaged(f"{paths[0]} is not what was written.")
    try:
        tree = json.loads(content)
        newer = tree["format"] > FORMAT
        renamed = {} if newer else {key: with_current_keys(tree.pop(name)) for key, name in _ON_DISK.items()}
        manifest = None if newer else _checked(Manifest(**renamed, **tree))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise Damaged(f"{paths[0]} is no manifest of a checkpoint: {str(error)[:200]}.") from error
    if manifest is None:
        raise InputError(f"{folder} is a checkpoint of format {tree['format']}, but this zaya_jax knows formats up to "
                         f"{FORMAT}: take a newer one.")  # fmt: skip
    return manifest


def _checked(manifest: Manifest) -> Manifest:
    """The manifest, if its parts have the types that readers count on; ValueError otherwise.

    Its digest tells damage. A file somebody else has made has a right one, too.
    """
    for tree, types in ((vars(manifest), _TYPES), (manifest.metadata, _METADATA_TYPES)):
        for key in types.keys() & tree.keys():
            if type(tree[key]) not in types[key]:
                raise ValueError(f"its {key} is of type {type(tree[key]).__name__}")
    for name, leaf in manifest.leaves.items():
        shape = leaf.get("shape") if isinstance(leaf, dict) else None
        sizes = isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)
        if not sizes or not isinstance(leaf.get("dtype"), str):
            raise ValueError(f"the array {name:.100} has no dtype and shape")
    for name, size in manifest.files.items():
        if type(size) is not int or Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"it lists the file {name!r:.100} of {size!r:.100} bytes")
    for name, text in manifest.digests.items():
        if name not in manifest.files or not isinstance(text, str):
            raise ValueError(f"it has a digest of {name!r:.100}, which is none of its files")
    return manifest


def read_digests(folder: Path, manifest: Manifest, reader: int = 0, readers: int = 1) -> Digests:
    """The digests of the parts that a reader is to see to; empty where none were taken.

    The reader of a number sees to what the process of that number saved, which in the same layout it has.
    """
    try:
        files = sorted((name for name in manifest.digests if name.startswith(f"{DIGESTS}/")), key=_process)
        digests = joined(json.loads(_bytes(folder / name)) for name in files if _process(name) % readers == reader)
        for where in (where for parts in digests.values() for where in parts):
            read_slice(where)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise Damaged(f"{folder / DIGESTS} holds no digests of a checkpoint: {str(error)[:200]}.") from error
    return digests


def _process(name: str) -> int:
    return int(Path(name).stem.rpartition("_")[2])


def file_digests(folder: Path) -> dict[str, str]:
    """Digest of each file of a checkpoint that holds no array, by path within it.

    Values lie in what a process has written (`state/ocdbt.process_…`); they have digests that were not taken of files.
    """
    return {name: digest((folder / name).read_bytes()) for name in list_files(folder) if not name.startswith(_VALUES)}


def list_files(folder: Path) -> dict[str, int]:
    """Size of each file in a checkpoint, by path within it."""
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in sorted(folder.rglob("*"))
            if path.is_file()}  # fmt: skip


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise Damaged(f"{path} is missing.") from error
    except OSError as error:
        raise Unreadable(f"{path} cannot be read: {error.strerror}. That does not mean that it is damaged.") from error
