"""List input files and folders, and cut them into units of work. The result is the same on every machine."""

import codecs
import itertools
import json
import os
import re
import stat
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from zaya_jax.config.checks import counted, require
from zaya_jax.data.readers.formats import FORMATS, load_format
from zaya_jax.data.readers.saved import saved_files
from zaya_jax.data.readers.unit import InputFile, Unit, reading
from zaya_jax.errors import InputError, printable

_PUSHSHIFT = re.compile(r"R[CS]_\d{4}-\d\d\.(zst|bz2|xz)")  # comments and submissions of Reddit, as JSON lines
_LEAST_UNIT, _MOST_UNIT, _UNITS = 2 * 2**20, 2**30, 512


def list_units(
    inputs: Sequence[str | Path], *, suffixes: tuple[str, ...] = (".txt",), unit_bytes: int | None = None
) -> list[Unit]:
    """Cut the inputs into units of work, in the order of the inputs.

    The result depends only on the arguments and the files.

    Args:
      inputs: paths of these kinds:
        - files with a known suffix; for Megatron datasets the `.bin`, the `.idx` or their common prefix;
        - folders written by `datasets.save_to_disk`;
        - other folders, which are searched recursively and in sorted order for files with a known suffix, except
          hidden files and links to folders.
      suffixes: suffixes of text files, in addition to those of `FORMATS`.
      unit_bytes: size of a unit. None means 1/512 of the input, but at least 2 MiB and at most 1 GiB. A compressed
        file, an Arrow stream, a row group, a text and a Megatron document are never cut.

    Raises:
      InputError: an input is missing, unreadable, empty or given twice, has an unknown suffix, or is a folder without
        documents; or `unit_bytes` is not positive.
    """
    require(unit_bytes is None or unit_bytes >= 1, "unit_bytes", unit_bytes, "at least 1")
    if isinstance(inputs, str | Path) or not inputs:
        raise InputError(f"The inputs are {inputs!r}, but must be a list of at least one file or folder.")
    files = [file for path in inputs for file in _list_files(Path(os.path.expanduser(path)), suffixes)]
    _check_distinct(files)
    if unit_bytes is None:
        unit_bytes = max(_LEAST_UNIT, min(_MOST_UNIT, sum(file.bytes for file in files) // _UNITS))
    units = list(_units(files, unit_bytes))
    if not units:
        raise InputError(f"The inputs contain no document: {', '.join(map(str, inputs))}.")
    return units


def _list_files(path: Path, suffixes: tuple[str, ...]) -> list[InputFile]:
    if os.path.isdir(path):
        unread = Counter[str]()
        files = list(_walk(path, suffixes, unread))
        if not any(file.bytes for file in files):
            raise InputError(f"The folder {path} contains no non-empty file with a known suffix: {_known(suffixes)}. "
                             "For other text files pass --suffixes, such as --suffixes .py .md.")  # fmt: skip
        if unread:
            kinds = ", ".join(f"{count:,} {kind}" for kind, count in unread.most_common(5))
            print(f"data: {printable(str(path))} has {counted(unread.total(), 'item')} not read: {kinds}. "
                  f"Known suffixes are {_known(suffixes)}.", file=sys.stderr)  # fmt: skip
        return files
    if path.name.endswith(".idx"):
        path = path.with_name(path.name.removesuffix(".idx") + ".bin")
    elif not os.path.exists(path) and any(os.path.exists(f"{path}{end}") for end in (".bin", ".idx")):
        path = path.with_name(path.name + ".bin")
    # Check existence first, so that a missing file with an unknown suffix is reported as missing.
    kind = _format(path.name, suffixes)
    lines = kind is None and path.suffix == ".json"
    file = _file(path, "jsonl" if lines else kind or "text")
    if lines:
        _require_lines(path)
        return [file]
    if kind is None:
        raise InputError(f"The file {path} has an unknown suffix; known suffixes are {_known(suffixes)}.")
    if not file.bytes:
        raise InputError(f"The file {path} is empty; leave it out.")
    return [file]


def _walk(folder: Path, suffixes: tuple[str, ...], unread: Counter[str]) -> Iterator[InputFile]:
    """Yield the files of a folder that are read, and count the others by suffix, except hidden ones."""
    saved = saved_files(folder)
    if saved is not None:
        yield from (_file(path, "arrow") for path in saved)
        return
    try:
        with os.scandir(folder) as scan:
            entries = sorted(scan, key=lambda entry: entry.name)
    except OSError as error:
        raise InputError(f"The folder {folder} cannot be listed: {error.strerror}.") from error
    for entry in entries:
        if entry.name.startswith("."):
            continue
        kind = _format(entry.name, suffixes)
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(Path(entry.path), suffixes, unread)
        elif os.path.isdir(entry.path):
            unread["(link to a folder)"] += 1
        elif kind:
            yield _file(Path(entry.path), kind)
        elif not entry.name.endswith(".idx"):  # of a Megatron dataset, read with its .bin
            unread[printable(Path(entry.name).suffix) or "without suffix"] += 1


def _format(name: str, suffixes: tuple[str, ...]) -> str | None:
    for kind, endings in FORMATS.items():
        if name.endswith(endings):
            return kind
    if _PUSHSHIFT.fullmatch(name):
        return "jsonl"
    return "text" if name.endswith(suffixes) else None


def _known(suffixes: tuple[str, ...]) -> str:
    return ", ".join([*itertools.chain(*FORMATS.values()), *suffixes])


def _first_lines(path: Path, count: int) -> list[bytes]:
    with reading(f"The file {path}"), path.open("rb") as file:
        lines = (file.readline(2**20).strip().removeprefix(codecs.BOM_UTF8) for _ in range(100))
        return list(itertools.islice(filter(None, lines), count))


def _are_objects(lines: Sequence[bytes]) -> bool:
    try:
        return bool(lines) and all(isinstance(json.loads(line), dict) for line in lines)
    except ValueError:
        return False


def _require_lines(path: Path) -> None:
    """Raise `InputError` unless a `.json` file has JSON lines, as far as its beginning tells."""
    if not _are_objects(_first_lines(path, 1)):
        raise InputError(f"The file {path} has no JSON object in its first line, but must have one per line. Convert "
                         f"it, for example with: jq -c '.[]' {path} > {path.with_suffix('.jsonl')}")  # fmt: skip


def _file(path: Path, kind: str) -> InputFile:
    with reading(f"The input {path}"):
        status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise InputError(f"The input {path} is neither a file nor a folder.")
    if not os.access(path, os.R_OK):
        raise InputError(f"The input {path} cannot be read: its permissions forbid it.")
    for companion in load_format(kind).companions(str(path)):
        if not os.path.exists(companion):
            raise InputError(f"The file {path} needs {companion} next to it, which is missing.")
    if kind == "text" and path.suffix == ".json" and len(lines := _first_lines(path, 2)) == 2 and _are_objects(lines):
        raise InputError(f"The file {path} has one JSON object per line, but --suffixes or data.suffixes (.json) reads "
                         "it as a single text. Rename such files to .jsonl, and leave out .json.")  # fmt: skip
    return InputFile(kind, str(path), status.st_size)


def _check_distinct(files: Sequence[InputFile]) -> None:
    seen: dict[str, str] = {}
    for file in files:
        path = os.path.realpath(file.path)
        if path in seen:
            link = "" if os.path.abspath(seen[path]) == os.path.abspath(file.path) else f", also as {seen[path]}"
            raise InputError(f"The file {file.path} is given twice{link}; pass each file, or a folder that contains "
                             "it, once.")  # fmt: skip
        seen[path] = file.path


def _units(files: Sequence[InputFile], unit_bytes: int) -> Iterator[Unit]:
    for name, group in itertools.groupby(files, lambda file: file.format):
        yield from load_format(name).cut(list(group), unit_bytes)
