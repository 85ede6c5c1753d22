"""A copy of the newest checkpoint on each node's own disk or memory, from which a run that is started again reads.

Each process keeps the bytes of what its devices hold. They count only where every process finds all it needs, and
all of it has the digests of the checkpoint itself.
"""

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from zaya_jax.checkpoint.digest import array_digest, assemble
from zaya_jax.run.digests import Digests, digest, read_slice, slice_text
from zaya_jax.run.files import read_json

_INDEX = "index.json"


class LocalCopies:
    """The folder of copies of one run on this node; nothing where there is none configured."""

    def __init__(self, folder: str | None, run: Path) -> None:
        """`run` is the folder of the checkpoints that are copied, by whose path copies of several runs differ."""
        self._home: Path | None = None
        if folder is not None:
            name = f"{digest(str(run).encode())[:12]}-{jax.process_index()}"
            self._home = Path(folder).expanduser() / name
        self._staged: dict[tuple[str, str], np.ndarray] = {}
        self._warned = False  # since a copy was last written

    def stage(self, arrays: Mapping[str, jax.Array]) -> None:
        """Take what this process has of `arrays` into host memory, until `keep`."""
        if self._home is None:
            return
        self._staged = {
            (name, slice_text(shard.index, array.shape)): np.asarray(shard.data)
            for name, array in arrays.items()
            for shard in array.addressable_shards
        }

    def discard(self) -> None:
        """Let go of what is staged."""
        self._staged = {}

    def commit(self, step: int) -> str:
        """Write what is staged as the copy of the checkpoint of `step`, and remove older ones.

        A copy that cannot be written is none: there is still the checkpoint.

        Returns:
          A sentence where the copy cannot be written, the first time in a row; otherwise nothing.
        """
        staged, self._staged = self._staged, {}
        if self._home is None or not staged:
            return ""
        part = self._home / f"{step}.partial"
        try:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            index = []
            for number, ((name, where), data) in enumerate(staged.items()):
                np.ascontiguousarray(data).tofile(part / str(number))
                index.append([name, where])
            (part / _INDEX).write_text(json.dumps(index), encoding="utf-8")
            shutil.rmtree(self._home / str(step), ignore_errors=True)
            part.rename(self._home / str(step))
            for path in self._home.iterdir():
                if path.name != str(step):
                    shutil.rmtree(path, ignore_errors=True)
        except (OSError, ValueError) as error:  # ValueError: a path that no folder can have
            shutil.rmtree(part, ignore_errors=True)
            warned, self._warned = self._warned, True
            why = getattr(error, "strerror", None) or str(error)
            return "" if warned else (
                f"The copy of the checkpoint of step {step} in checkpoint.local_dir ({self._home}) cannot be written: "
                f"{why}. Training continues without local copies."
            )  # fmt: skip
        self._warned = False
        return ""

    def read(self, step: int, abstract: Mapping[str, Any], digests: Digests) -> dict[str, jax.Array] | None:
        """The arrays as `abstract` has them laid out; None where the copy lacks a part or differs."""
        if self._home is None:
            return None
        folder = self._home / str(step)
        try:
            index = read_json(folder / _INDEX)
            files = {(name, where): folder / str(number) for number, (name, where) in enumerate(index)}
            return {name: _array(name, leaf, files, digests[name]) for name, leaf in abstract.items()}
        except (OSError, ValueError, KeyError, TypeError):  # what a damaged index may bring about, too
            return None


def _array(name: str, leaf: Any, files: Mapping[tuple[str, str], Path], digests: Mapping[str, str]) -> jax.Array:
    """One array of the copy; KeyError or ValueError where a part is missing or differs."""

    def read(where: str) -> np.ndarray:
        path, shape = files[name, where], [axis.stop - axis.start for axis in read_slice(where)]
        if path.stat().st_size != math.prod(shape) * leaf.dtype.itemsize:  # before memory is taken
            raise ValueError(f"{path} has another size than {name}[{where}].")
        data = np.fromfile(path, leaf.dtype)
        if array_digest(data) != digests[where]:
            raise ValueError(f"{name}[{where}] does not match its checksum.")
        return data.reshape(shape)

    return assemble(leaf, read)
