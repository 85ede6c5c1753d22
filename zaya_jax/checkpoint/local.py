"""Node-local copies of the newest checkpoint, for fast restarts.

Each process stores the shards of its devices. A copy is used only if every process finds all its shards and they match
the checkpoint's digests.
"""

import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from zaya_jax.checkpoint.digest import array_digest, assemble
from zaya_jax.run.digests import Digests, digest, read_slice, slice_text
from zaya_jax.run.files import expanded, read_json
from zaya_jax.run.writing import new_folder, private_folder, remove

_INDEX = "index.json"
_COPY = re.compile(r"\d+(\.partial)?")  # what is removed


class LocalCopies:
    """The local copies of one run on this node; does nothing if `checkpoint.local_dir` is null."""

    def __init__(self, folder: str | None, run: Path) -> None:
        """Use a subfolder of `folder` that is derived from `run`, the run's checkpoint folder."""
        self._home: Path | None = None
        if folder is not None:
            name = f"{digest(str(run).encode(errors='surrogateescape'))[:12]}-{jax.process_index()}"
            self._home = expanded(folder) / name
        self._staged: dict[tuple[str, str], np.ndarray] = {}
        self._warned = False  # since a copy was last written

    def stage(self, arrays: Mapping[str, jax.Array]) -> None:
        """Copy this process's shards of `arrays` into host memory, until `commit` or `discard`."""
        if self._home is None:
            return
        self._staged = {
            (name, slice_text(shard.index, array.shape)): np.asarray(shard.data)
            for name, array in arrays.items()
            for shard in array.addressable_shards
        }

    def discard(self) -> None:
        """Drop the staged shards."""
        self._staged = {}

    def commit(self, step: int) -> str:
        """Write the staged shards as the copy of `step`, and remove older ones; return why the first attempt failed."""
        staged, self._staged = self._staged, {}
        if self._home is None or not staged:
            return ""
        try:
            with private_folder(self._home) as home:
                _write(home, step, staged)
        except (OSError, ValueError) as error:  # ValueError: an invalid path
            warned, self._warned = self._warned, True
            reason = getattr(error, "strerror", None) or str(error)
            copy = f"The local copy of the checkpoint of step {step}"
            problem = f"{copy} cannot be written to checkpoint.local_dir ({self._home}): {reason}"
            return "" if warned else f"{problem}. Training continues without local copies."
        self._warned = False
        return ""

    def read(self, step: int, abstract: Mapping[str, Any], digests: Digests) -> dict[str, jax.Array] | None:
        """Read the arrays with the layout of `abstract`; None if a part is missing or differs."""
        if self._home is None:
            return None
        folder = self._home / str(step)
        try:
            index = read_json(folder / _INDEX)
            files = {(name, span): folder / str(number) for number, (name, span) in enumerate(index)}
            return {name: _array(name, leaf, files, digests[name]) for name, leaf in abstract.items()}
        except (OSError, ValueError, KeyError, TypeError):  # also raised by a damaged index
            return None


def _write(home: Path, step: int, staged: Mapping[tuple[str, str], np.ndarray]) -> None:
    """Write the copy of a step into this run's private folder, and remove other copies there."""
    part = home / f"{step}.partial"
    with new_folder(home / str(step), part):
        for number, data in enumerate(staged.values()):
            np.ascontiguousarray(data).tofile(part / str(number))
        (part / _INDEX).write_text(json.dumps(list(staged)), encoding="utf-8")
        remove(home / str(step))
    for name in os.listdir(home):
        if _COPY.fullmatch(name) and name != str(step):
            remove(home / name, ignore_errors=True)


def _array(name: str, leaf: Any, files: Mapping[tuple[str, str], Path], digests: Mapping[str, str]) -> jax.Array:
    """Read one array of the copy; KeyError or ValueError if a part is missing or differs."""

    def read(span: str) -> np.ndarray:
        path, shape = files[name, span], [axis.stop - axis.start for axis in read_slice(span)]
        if path.stat().st_size != math.prod(shape) * leaf.dtype.itemsize:  # before memory is allocated
            raise ValueError(f"{path} does not have the size of {name}[{span}].")
        data = np.fromfile(path, leaf.dtype)
        if array_digest(data) != digests[span]:
            raise ValueError(f"{name}[{span}] does not match its checksum.")
        return data.reshape(shape)

    return assemble(leaf, read)
