"""List the Arrow files of datasets written by `datasets.save_to_disk`, in order."""

import os
import sys
from pathlib import Path
from typing import Any

from zaya_jax.errors import InputError
from zaya_jax.run.files import read_object

_DICT, _STATE, _INFO = "dataset_dict.json", "state.json", "dataset_info.json"


def saved_files(folder: Path) -> list[Path] | None:
    """Return the Arrow files of a saved dataset or, split by split, of a saved dataset dict; None for other folders.

    Other Arrow files in the folder are caches of `datasets` and not part of the dataset. `InputError` if the JSON files
    of the dataset cannot be read or parsed, or a split is missing.
    """
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
