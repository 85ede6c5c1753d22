"""List input files and folders, cut them into units of work, and read a unit. The same on every machine."""

import importlib
import itertools
import json
import os
import re
import stat
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from zaya_jax.config.checks import counted, list_counts, require
from zaya_jax.data.readers.documents import Entry, Format, InputFile, Unit, reading
from zaya_jax.data.readers.jsonl import is_list, plain_lines
from zaya_jax.errors import InputError, printable
from zaya_jax.run.files import explained, hub_hint, nearest_path, read_object

PACKED = ("gz", "zst", "bz2", "xz")
# `Unit.format` → suffixes of its files. To add a format, add a module that defines `FORMAT`, and lines here.
FORMATS: dict[str, tuple[str, ...]] = {
    # C4 and Dolma call compressed JSON lines `.json.gz`.
    "jsonl": (".jsonl", ".ndjson", *(f".{name}.{packed}" for name in ("jsonl", "ndjson", "json") for packed in PACKED)),
    "parquet": (".parquet",),
    "arrow": (".arrow",),
    "megatron": (".bin",),
    "csv_table": (),  # a .csv file that is named
    "text": (),  # suffixes are an argument of `list_units`
}
_NAMED = {".json": "jsonl", ".csv": "csv_table"}  # suffixes of files that are read if they are named
_MODULES = {"parquet": "tables", "arrow": "tables"}  # others are named like the format
# Comments and submissions of Reddit, as JSON lines: of a month, of a day, or of a subreddit.
_PUSHSHIFT = re.compile(r"R[CS](_v2)?_\d{4}-\d\d(-\d\d)?\.(gz|zst|bz2|xz)|.+_(comments|submissions)\.zst")
_DICT, _STATE, _INFO = "dataset_dict.json", "state.json", "dataset_info.json"  # of `datasets.save_to_disk`
_LEAST_UNIT, _MOST_UNIT, _UNITS = 2 * 2**20, 2**30, 512


def load_format(name: str) -> Format:
    """Import a format of `FORMATS` on first use, because tables need pyarrow."""
    return importlib.import_module(f"zaya_jax.data.readers.{_MODULES.get(name, name)}").FORMAT


def read_unit(unit: Unit, *, field: str) -> Iterator[Entry]:
    """Read the documents of a unit in order, with only a few of them in memory.

    Yields a `Document` for each text that is not only white space, non-empty list, or array of token ids, and a
    `BadDocument` for anything else but blank lines. `field` is a JSON key or column, ignored for text and Megatron.
    `InputError` during iteration if a file cannot be read, is damaged, or has no such column.
    """
    return load_format(unit.format).read(unit, field)


def list_units(
    inputs: Sequence[str | Path],
    *,
    suffixes: tuple[str, ...] = (".txt",),
    unit_bytes: int | None = None,
    unread: Counter[str] | None = None,
) -> list[Unit]:
    """Cut the inputs into units of work, in the order of the inputs. The result depends only on them and the files.

    Args:
      inputs: files with a known suffix (for Megatron datasets the `.bin`, the `.idx` or their common prefix); folders
        written by `datasets.save_to_disk`; and other folders, which are searched recursively and in sorted order.
      suffixes: suffixes of text files, in addition to those of `FORMATS`.
      unit_bytes: None means 1/512 of the input, but at least 2 MiB and at most 1 GiB. A compressed file, an Arrow
        stream, a row group, a text and a Megatron document are never cut.
      unread: to which the number of items that are not read is added, by kind; they are printed, too.

    Raises:
      InputError: an input cannot be used, is given twice or has no documents; or `unit_bytes` is not positive.
    """
    require(unit_bytes is None or unit_bytes >= 1, "unit_bytes", unit_bytes, "at least 1")
    if isinstance(inputs, str | Path) or not inputs:
        raise InputError(f"The inputs are {inputs!r}, but must be a list of at least one file or folder.")
    unread = Counter() if unread is None else unread
    files = [file for path in inputs for file in _list_files(Path(os.path.expanduser(path)), suffixes, unread)]
    _check_distinct(files)
    if unit_bytes is None:
        unit_bytes = max(_LEAST_UNIT, min(_MOST_UNIT, sum(file.bytes for file in files) // _UNITS))
    units: list[Unit] = []
    for kind, group in itertools.groupby(files, lambda file: file.format):
        units += load_format(kind).cut(list(group), unit_bytes)
    if not units:
        raise InputError(f"The inputs contain no document: {', '.join(map(str, inputs))}.")
    read = {file for unit in units for file in unit.files}
    unread.update("empty" for file in files if file.path not in read)
    if unread:
        named = [suffix for suffix in _NAMED if suffix in unread]
        advice = f" {' and '.join(named)} files are read if they are named." if named else ""
        if any(kind.startswith(".") and kind not in _NAMED for kind in unread):
            advice += " For other text files pass --suffixes."
        left_out = f"{counted(unread.total(), 'item')} of the input not read: {list_counts(unread)}"
        print(f"data: {left_out}.{advice}", file=sys.stderr)
    if raw := sum(file.format == "text" and file.path.endswith(".json") for file in files):
        print(f"data: {counted(raw, '.json file')} read as plain text, one document each.", file=sys.stderr)
    return units


def _list_files(path: Path, suffixes: tuple[str, ...], unread: Counter[str]) -> list[InputFile]:
    if os.path.isdir(path):
        files = list(_walk(path, suffixes, unread))
        if not any(file.bytes for file in files):
            raise InputError(f"The folder {path} contains no non-empty file with a known suffix: {_known(suffixes)}")
        return files
    if path.name.endswith(".idx"):
        path = path.with_name(path.name.removesuffix(".idx") + ".bin")
    elif not os.path.exists(path) and any(os.path.exists(f"{path}{end}") for end in (".bin", ".idx")):
        path = path.with_name(path.name + ".bin")
    if not os.path.lexists(path) and (hint := nearest_path(path) or hub_hint(str(path), is_data=True)):
        raise InputError(f"The input {path} does not exist.{hint}")
    # Check existence first, so that a missing file with an unknown suffix is reported as missing.
    kind = _format(path.name, suffixes) or _NAMED.get(path.suffix)
    file = _file(path, kind or "text")
    if kind is None:
        raise InputError(f"The file {path} has an unknown suffix; known ones are {_known(suffixes)}")
    if not file.bytes:
        raise InputError(f"The file {path} is empty; leave it out.")
    if kind == "jsonl" and path.suffix == ".json" and not (is_list(str(path)) or _has_objects(path, 1)):
        allowed = "must have one per line, or one list of them"
        raise InputError(f"The file {path} has no JSON object in its first line, but {allowed}.")
    return [file]


def _walk(folder: Path, suffixes: tuple[str, ...], unread: Counter[str]) -> Iterator[InputFile]:
    """Yield the files of a folder that are read, and count other items in `unread`."""
    saved = saved_files(folder)
    if saved is not None:
        yield from (_file(path, "arrow") for path in saved)
        # Caches of `datasets`, or splits that were added by hand.
        unread.update("unlisted .arrow" for path in folder.rglob("*.arrow") if path not in saved)
        return
    for entry in list_folder(folder, unread):
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(Path(entry.path), suffixes, unread)
        elif kind := _format(entry.name, suffixes):
            yield _file(Path(entry.path), kind)
        elif not (entry.name.endswith(".idx") and os.path.exists(f"{entry.path[:-4]}.bin")):  # read with its .bin
            unread[suffix_kind(entry.name)] += 1


def saved_files(folder: Path) -> list[Path] | None:
    """Return the Arrow files of a saved dataset or, split by split, of a dataset dict; None for other folders."""
    if os.path.isfile(folder / _DICT):
        splits = _names(folder / _DICT, _json(folder / _DICT, "splits"))
        return [file for split in splits for file in _split_files(folder / split)]
    return _split_files(folder) if all(os.path.isfile(folder / name) for name in (_STATE, _INFO)) else None


def _split_files(folder: Path) -> list[Path]:
    if read_object(folder / _STATE).get("_indices_data_files"):
        raise InputError(
            f"The saved dataset {folder} selects its rows through _indices_data_files, as old versions of "
            "datasets did, which is not read. Load it, call flatten_indices(), and save it again."
        )
    entries = _json(folder / _STATE, "_data_files")
    names = [entry.get("filename") if isinstance(entry, dict) else None for entry in entries]
    files = [folder / name for name in _names(folder / _STATE, names)]
    _compare_rows(folder, files)
    return files


def _compare_rows(folder: Path, files: list[Path]) -> None:
    """Warn if a dataset has fewer rows than its info lists. `datasets` keeps the old number when rows are filtered."""
    split = read_object(folder / _STATE).get("_split")
    try:
        expected = read_object(folder / _INFO)["splits"][split]["num_examples"]
    except (KeyError, TypeError):
        return
    if not isinstance(expected, int) or not all(file.is_file() for file in files):
        return
    from zaya_jax.data.readers.tables import count_rows

    rows = sum(count_rows(str(file)) for file in files)
    if rows < expected:
        print(
            f"data: the saved dataset {folder} has {rows:,} rows, but {_INFO} says that split {split!r} has "
            f"{expected:,}. Unless rows were filtered out, save or copy it again.",
            file=sys.stderr,
        )


def _json(path: Path, key: str) -> list[Any]:
    tree = read_object(path)
    if not isinstance(tree.get(key), list):
        raise InputError(f"The file {path} of a saved dataset must be an object with a list {key!r}.")
    return tree[key]


def _names(path: Path, names: list[Any]) -> list[str]:
    if not all(isinstance(name, str) and name and Path(name).name == name for name in names):
        raise InputError(f"The file {path} of a saved dataset must list file names, but lists {names!r}.")
    return names


def list_folder(folder: Path, unread: Counter[str]) -> Iterator[os.DirEntry[str]]:
    """Yield the files and folders in a folder, sorted by name; count in `unread` the items that are left out."""
    with explained(f"The folder {folder} cannot be listed"), os.scandir(folder) as scan:
        entries = sorted(scan, key=lambda entry: entry.name)
    for entry in entries:
        if entry.name.startswith("."):
            unread["hidden"] += 1
        elif entry.is_symlink() and os.path.isdir(entry.path):
            unread["linked (folders)"] += 1
        else:
            yield entry


def suffix_kind(name: str) -> str:
    """Return what counts of unread files call a file; numbers and long suffixes, which can be many, count as none."""
    suffix = Path(name).suffix
    return "without suffix" if len(suffix) > 12 or not suffix.strip(".0123456789") else printable(suffix)


def _format(name: str, suffixes: tuple[str, ...]) -> str | None:
    known = (kind for kind, endings in FORMATS.items() if name.endswith(endings))
    other = "text" if name.endswith(suffixes) else None
    return next(known, "jsonl" if _PUSHSHIFT.fullmatch(name) else other)


def _known(suffixes: tuple[str, ...]) -> str:
    found = ", ".join([*itertools.chain(*FORMATS.values()), *suffixes])
    advice = "For other text files pass --suffixes, such as --suffixes .py .md."
    return f"{found} and, of files that are named, {', '.join(_NAMED)}. {advice}"


def _has_objects(path: Path, count: int) -> bool:
    """Return whether each of the first `count` lines of a file that are not blank is a JSON object."""
    filled = (line for line, _ in plain_lines(str(path), 0, path.stat().st_size) if line.strip())
    lines = list(itertools.islice(filled, count))
    try:
        return len(lines) == count and all(isinstance(json.loads(line), dict) for line in lines)
    except (ValueError, RecursionError):
        return False


def refuse_lines(path: Path) -> None:
    """Raise `InputError` if a file that would be read as one text has JSON lines, as far as its beginning tells."""
    if path.suffix in (".json", *FORMATS["jsonl"]) and _has_objects(path, 2):
        advice = "Read it with" if path.suffix in FORMATS["jsonl"] else "Name it .jsonl, and read it with"
        raise InputError(
            f"The file {path} has one JSON object per line, but --suffixes or data.suffixes makes it one "
            f"text. {advice} python -m zaya_jax.data prepare."
        )


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
    if kind == "text":
        refuse_lines(path)
    return InputFile(kind, str(path), status.st_size)


def _check_distinct(files: Sequence[InputFile]) -> None:
    seen: dict[str, str] = {}
    for file in files:
        path = os.path.realpath(file.path)
        if path in seen:
            link = "" if os.path.abspath(seen[path]) == os.path.abspath(file.path) else f", also as {seen[path]}"
            advice = "pass each file, or a folder that contains it, once"
            raise InputError(f"The file {file.path} is given twice{link}; {advice}.")
        seen[path] = file.path
