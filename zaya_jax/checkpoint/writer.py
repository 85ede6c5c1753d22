"""Write an averaged or imported checkpoint from host memory, part by part, in one process.

The layout is Orbax's, so the same code reads both.
"""

import json
import math
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore

from zaya_jax.checkpoint.digest import ArrayPart, array_digest
from zaya_jax.errors import InputError, as_sentence
from zaya_jax.run.digests import Digests, digest, leaf_digest, read_slice
from zaya_jax.run.files import sync_folder, write_atomically
from zaya_jax.run.manifest import DIGESTS, STATE, Manifest, list_files, write_manifest
from zaya_jax.run.plain_path import plain_path
from zaya_jax.run.progress import WorkProgress
from zaya_jax.run.writing import make_folder, new_folder


def write_checkpoint(
    folder: Path, step: int, metadata: Mapping[str, Any], leaves: Mapping[str, Any], parts: Iterator[ArrayPart]
) -> None:
    """Write a checkpoint to RUN_DIR/checkpoints/STEP, atomically and durably; see `Manifest` for `metadata`.

    `leaves` has the dtype and shape of each array. `parts` cover all arrays; the parts of an array have equal shapes,
    except for the last along an axis. `InputError` if `folder` exists, or cannot be written.
    """
    if folder.exists():
        raise InputError(f"{folder} already exists; choose a new run folder.")
    work = folder.with_name(f"{folder.name}.partial")
    try:
        with new_folder(folder, work):
            make_folder(work / DIGESTS)
            digests = _write_parts(work / STATE, leaves, parts)
            text = json.dumps(digests).encode()
            write_atomically(work / DIGESTS / "process_0.json", text.decode())
            sync_folder(work / DIGESTS)
            described = {name: dict(leaf) | {"digest": leaf_digest(digests[name])} for name, leaf in leaves.items()}
            files, checked = list_files(work), {f"{DIGESTS}/process_0.json": digest(text)}
            write_manifest(work, Manifest(step, 0, dict(metadata), described, files, checked, read_back=False))
        sync_folder(folder.parent)
    except InputError:
        raise
    except (OSError, ValueError) as error:  # tensorstore's errors are ValueErrors
        raise InputError(f"{folder} cannot be written: {as_sentence(error)}") from error


def _write_parts(state: Path, leaves: Mapping[str, Any], parts: Iterator[ArrayPart]) -> Digests:
    store = {"driver": "ocdbt", "base": f"file://{plain_path(state.parent)}/{state.name}/"}
    arrays: dict[str, Any] = {}
    digests: Digests = {}
    total = sum(math.prod(leaf["shape"]) * np.dtype(leaf["dtype"]).itemsize for leaf in leaves.values())
    # Overlap writing one part with producing the next: two parts are in memory.
    with WorkProgress("writing the checkpoint", total) as progress, ThreadPoolExecutor(1, "write") as pool:
        writing: Future[None] | None = None
        for part in parts:
            if part.name not in arrays:
                arrays[part.name] = _create(store, part.name, leaves[part.name], part.data)
            digests.setdefault(part.name, {})[part.span] = array_digest(part.data)
            progress.add(part.data.nbytes)
            if writing is not None:
                writing.result()
            place = arrays[part.name][read_slice(part.span)]
            writing = pool.submit(lambda place=place, data=part.data: place.write(data).result())
        if writing is not None:
            writing.result()
    return digests


def _create(store: Mapping[str, Any], name: str, leaf: Mapping[str, Any], first: np.ndarray) -> Any:
    spec = {
        "driver": "zarr3",
        "kvstore": {**store, "path": f"{name}/"},
        "metadata": {
            "shape": list(leaf["shape"]),
            "data_type": leaf["dtype"],
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [max(1, n) for n in first.shape]}},
            "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
        },
    }
    return tensorstore.open(spec, create=True).result()
