"""Datasets that `datasets.save_to_disk` wrote: which Arrow files they have, and in which order."""

import json
import os
from pathlib import Path
from typing import Any

from zaya_jax.errors import InputError

_DICT, _STATE, _INFO = "dataset_dict.json", "state.json", "dataset_info.json"


def saved_files(folder: Path) -> list[Path] | None:
    """The Arrow files of a saved dataset, those of a dataset dict split by split; None for any other folder.

    Other Arrow files in the folder are caches of the library and no part of the dataset.

    Raises:
      InputError: the JSON files of the dataset cannot be read or say something else, or a split is missing.
    """
    if os.path.isfile(folder / _DICT):
        splits = _names(folder / _DICT, _json(folder / _DICT, "splits"))
        return [file for split in splits for file in _split_files(folder / split)]
    return _split_files(folder) if all(os.path.isfile(folder / name) for name in (_STATE, _INFO)) else None


def _split_files(folder: Path) -> list[Path]:
    entries = _json(folder / _STATE, "_data_files")
    names = [entry.get("filename") if isinstance(entry, dict) else None for entry in entries]
    return [folder / name for name in _names(folder / _STATE, names)]


def _json(path: Path, key: str) -> list[Any]:
    try:
        tree = json.loads(path.read_bytes())
    except OSError as error:
        raise InputError(f"The file {path} of a saved dataset cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"The file {path} of a saved dataset is not JSON: {error}.") from error
    if not isinstance(tree, dict) or not isinstance(tree.get(key), list):
        raise InputError(f"The file {path} of a saved dataset must be an object with a list {key!r}.")
    return tree[key]


def _names(path: Path, names: list[Any]) -> list[str]:
    if not all(isinstance(name, str) and name and Path(name).name == name for name in names):
        raise InputError(f"The file {path} of a saved dataset must list names, but lists {names!r}.")
    return names
