"""Copies of the newest checkpoint on this node, for fast restarts.

Each process stores the parts of the arrays on its devices; the supervisor of a spare node those of all processes.
"""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from zaya_jax.checkpoint.digest import ArrayPart, array_digest, assemble, pieces
from zaya_jax.run.digests import Digests, read_slice, slice_text
from zaya_jax.run.local_copies import copies_folder, part_file, remove_earlier_copies, remove_other_steps
from zaya_jax.run.writing import private_folder

_THREADS = 8


class LocalCopies:
    """The local copies of one run on this node; does nothing if `checkpoint.local_dir` is null."""

    def __init__(self, folder: str | None, run: Path) -> None:
        """Use a subfolder of `folder` that is derived from `run`, the run's checkpoint folder."""
        self._home = None if folder is None else copies_folder(folder, run)
        self._staged: dict[str, np.ndarray] = {}  # by file
        self._warned = False  # since a copy was last written

    def stage(self, arrays: Mapping[str, jax.Array]) -> None:
        """Copy this process's parts of `arrays` into host memory, until `commit` or `discard`."""
        if self._home is None:
            return
        self._staged = {
            part_file(name, piece.span): piece.data
            for name, array in arrays.items()
            for shard in array.addressable_shards
            for piece in pieces(ArrayPart(name, slice_text(shard.index, array.shape), np.asarray(shard.data)))
        }

    def discard(self) -> None:
        """Drop the staged parts."""
        self._staged = {}

    def commit(self, step: int) -> str:
        """Write the staged parts as the copy of `step`, and remove older ones; return why the first attempt failed."""
        staged, self._staged = self._staged, {}
        if self._home is None or not staged:
            return ""
        try:
            with private_folder(self._home) as home:
                (home / str(step)).mkdir(exist_ok=True)
                for file, data in staged.items():
                    part = home / str(step) / f"{file}.{os.getpid()}"  # other nodes get whole files only
                    np.ascontiguousarray(data).tofile(part)
                    part.replace(home / str(step) / file)
                remove_other_steps(home, step)
                remove_earlier_copies(home)
        except (OSError, ValueError) as error:  # ValueError: an invalid path
            warned, self._warned = self._warned, True
            reason = getattr(error, "strerror", None) or str(error)
            copy = f"The local copy of the checkpoint of step {step}"
            problem = f"{copy} cannot be written to checkpoint.local_dir ({self._home}): {reason}"
            return "" if warned else f"{problem}. Training continues without local copies."
        self._warned = False
        return ""

    def read(
        self, step: int, abstract: Mapping[str, Any], digests: Digests, say: Callable[[str], object]
    ) -> dict[str, jax.Array]:
        """Read the arrays of which all parts for this process are here, with the layout of `abstract`.

        Parts that do not match their digests count as missing; `say` gets a sentence about them.
        """
        if self._home is None or not digests:
            return {}
        folder, wrong = self._home / str(step), list[str]()

        def read(name: str) -> jax.Array | None:
            try:
                leaf = abstract[name]
                return assemble(leaf, lambda span: _section(folder, name, span, leaf.dtype, digests.get(name, {})))
            except OSError:
                return None
            except ValueError as error:
                wrong.append(str(error))
                return None

        with ThreadPoolExecutor(_THREADS, "copies") as pool:
            arrays = dict(zip(abstract, pool.map(read, abstract), strict=True))
        if wrong:
            more = f", as do {len(wrong) - 1} more arrays" if len(wrong) > 1 else ""
            say(f"{wrong[0]}{more}. It is read from the checkpoint instead.")
        return {name: array for name, array in arrays.items() if array is not None}


def _section(folder: Path, name: str, span: str, dtype: Any, digests: Mapping[str, str]) -> np.ndarray:
    """Read a slice of an array from the parts that it overlaps; OSError if one is missing, ValueError if it differs."""
    wanted = read_slice(span)
    section, read = np.empty([axis.stop - axis.start for axis in wanted], dtype), 0
    for saved, text in digests.items():
        part = read_slice(saved)
        common = [slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(wanted, part, strict=True)]
        if all(axis.start < axis.stop for axis in common):
            data = _part(folder / part_file(name, saved), [axis.stop - axis.start for axis in part], dtype, text)
            section[_within(common, wanted)] = data[_within(common, part)]
            read += math.prod(axis.stop - axis.start for axis in common)
    if read != section.size:
        raise OSError(f"The checkpoint has no digests for all of {name}[{span}].")
    return section


def _within(index: Sequence[slice], outer: Sequence[slice]) -> tuple[slice, ...]:
    """Return an index of a whole array as one of its section `outer`."""
    return tuple(slice(a.start - b.start, a.stop - b.start) for a, b in zip(index, outer, strict=True))


def _part(path: Path, shape: list[int], dtype: Any, text: str) -> np.ndarray:
    """Read a part; OSError or ValueError if it is missing or does not match its digest."""
    is_whole = path.stat().st_size == math.prod(shape) * dtype.itemsize  # before memory is allocated
    data = np.fromfile(path, dtype) if is_whole else np.empty(0, dtype)
    if not is_whole or array_digest(data) != text:
        raise ValueError(f"The local copy {path} does not match the checksum of the checkpoint")
    return data.reshape(shape)
