"""Restore the newest intact checkpoint onto any device layout; damaged checkpoints are never restored."""

import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import jax

from zaya_jax.checkpoint.arrays import like, named
from zaya_jax.checkpoint.digest import assemble, differing
from zaya_jax.checkpoint.reader import CheckpointReader, retried, wrong_parts
from zaya_jax.checkpoint.store import CheckpointStore
from zaya_jax.errors import InputError, Reason, RunStopped
from zaya_jax.job.multihost import all_gather, broadcast, is_primary, primary_first
from zaya_jax.run import checkpoints as names
from zaya_jax.run.digests import Digests, read_slice
from zaya_jax.run.fencing import is_current
from zaya_jax.run.files import explained
from zaya_jax.run.manifest import Damaged, Manifest, Unreadable, read_digests, read_manifest
from zaya_jax.run.progress import WorkProgress

_PATIENCE = 3600  # seconds that the slowest process may take to read its part
_THREADS = 8
_KINDS = (InputError, Unreadable, Damaged)
T = TypeVar("T")


class Restored(NamedTuple):
    """A restored state and the manifest of its checkpoint."""

    state: Any
    manifest: Manifest


def restore_newest(
    store: CheckpointStore, prepare: Callable[[Manifest], Any], say: Callable[[str], object]
) -> Restored | None:
    """Restore the newest intact checkpoint of a run; quarantine damaged ones, and `say` so.

    `prepare` returns the abstract state with its shardings for a manifest; it can raise `InputError`. Returns None if
    no checkpoint was ever finished. `InputError` if its arrays do not match the state, `RunStopped` if all are damaged.
    """
    folder, quarantined = store.folder, ""
    while steps := broadcast(names.named_steps(folder)):
        try:
            manifest = _manifest(folder, steps[-1])
            return _restore(store, folder / str(steps[-1]), manifest, prepare(manifest))
        except Damaged as error:
            quarantined = primary_first(lambda step=steps[-1]: _quarantine(folder, step))
            if is_primary():
                say(f"{error} It was quarantined as {quarantined}. Trying the next older checkpoint.")
    if quarantined or broadcast(names.has_checkpoint(folder)):
        advice = "They are kept there; start again in another run_dir."
        raise RunStopped(f"Every checkpoint in {folder} is damaged. {advice}", Reason.NO_CHECKPOINT)
    return None


def read_checkpoint(
    folder: Path, prepare: Callable[[Manifest], Any], *, part: bool = False, manifest: Manifest | None = None
) -> Restored:
    """Restore the checkpoint in `folder` of any run, without changing that run; see `restore_newest`.

    With `part`, the state may omit arrays. `manifest` is that of the checkpoint, if it was read before. `InputError` if
    the checkpoint is damaged, cannot be read, or does not match the state.
    """
    try:
        manifest = _manifest(folder.parent, int(folder.name), manifest)
        return _restore(None, folder, manifest, prepare(manifest), part)
    except Damaged as error:
        raise InputError(f"{error}{names.suggest_older(folder)}") from error


def _quarantine(folder: Path, step: int) -> str:
    with explained(f"{folder / str(step)} is damaged, but cannot be quarantined (renamed)"):
        return names.quarantine(folder, step, "corrupt").name if is_primary() else ""


def _manifest(folder: Path, step: int, known: Manifest | None = None) -> Manifest:
    """Read the manifest of a checkpoint unless it is known; all processes agree on whether it can be used."""
    path = folder / str(step)

    def read() -> Manifest:
        manifest = known or retried(lambda: read_manifest(path))
        if manifest.step != step:
            raise Damaged(f"{path} contains the checkpoint of step {manifest.step}, not of step {step}.")
        if not is_current(folder, step, manifest.fencing_token):
            raise Damaged(f"{path} was saved by superseded processes, after others had resumed the run.")
        return manifest

    return _everywhere(read)


def _everywhere(read: Callable[[], T]) -> T:
    """Return what `read` returns in each process, or raise the error of any process in every process.

    Other `InputError`s take precedence over `Damaged`, so a checkpoint that one process cannot read is not
    quarantined.
    """
    result, own = None, None
    try:
        result = read()
    except InputError as error:
        own = [max(place for place, kind in enumerate(_KINDS) if isinstance(error, kind)), str(error)]
    every: list[Any] = all_gather("restore", own, _PATIENCE)
    if errors := list(filter(None, every)):
        place, text = min(errors)
        raise _KINDS[place](text)
    return cast("T", result)


def _restore(
    store: CheckpointStore | None, folder: Path, manifest: Manifest, abstract: Any, part: bool = False
) -> Restored:
    expected = named(abstract)
    _check_arrays(folder, manifest, expected, part)

    def read() -> tuple[dict[str, jax.Array], list[int]]:
        digests = {name: parts for name, parts in read_digests(folder, manifest).items() if name in expected}
        local = {} if store is None else store.local.read(manifest.step, expected, digests, print)
        rest = {name: leaf for name, leaf in expected.items() if name not in local}
        arrays = _load(CheckpointReader(folder, manifest.leaves, manifest.files), rest) if rest else {}
        if digests:
            _compare(folder, manifest, arrays, {name: parts for name, parts in digests.items() if name in rest})
        return local | arrays, [_local_bytes(local), _local_bytes(arrays), bool(digests)]

    arrays, own = _everywhere(read)
    local, loaded, verified = map(sum, zip(*all_gather("restore", own, _PATIENCE), strict=True))
    if store is not None and local and is_primary():
        sources = f"{local:,} bytes from copies on the nodes, {loaded:,} from {folder}"
        store.say(f"Restored the checkpoint of step {manifest.step}: {sources}.")
    if store is not None and verified and not local:
        store.verified.add(manifest.step)
    return Restored(like(abstract, arrays), manifest)


def _local_bytes(arrays: Mapping[str, jax.Array]) -> int:
    return sum(shard.data.nbytes for array in arrays.values() for shard in array.addressable_shards)


def _check_arrays(folder: Path, manifest: Manifest, expected: Mapping[str, Any], part: bool) -> None:

    def mismatch(reason: str) -> InputError:
        return InputError(f"The checkpoint {folder} cannot be restored into this configuration: {reason}")

    for name, leaf in expected.items():
        saved = manifest.leaves.get(name)
        if saved is None:
            raise mismatch(f"it has no array {name}.")
        if tuple(saved["shape"]) != leaf.shape or saved["dtype"] != str(leaf.dtype):
            ours = f"{leaf.dtype} {list(leaf.shape)}"
            raise mismatch(f"its {name} is {saved['dtype']} {saved['shape']}, but must be {ours}.")
    if more := [name for name in manifest.leaves if name not in expected and not part]:
        raise mismatch(f"it has extra arrays: {', '.join(more[:3])}{' and others' if len(more) > 3 else ''}.")


def _load(reader: CheckpointReader, expected: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Read this process's shards of each array, several arrays in parallel."""

    def load(name: str) -> jax.Array:
        leaf = expected[name]
        array = assemble(leaf, lambda span: reader.read(name, read_slice(span)))
        if array.dtype != leaf.dtype:  # 64 bits without JAX_ENABLE_X64
            problem = f"is {leaf.dtype}, but jax would truncate it to {array.dtype}; set JAX_ENABLE_X64=1."
            raise InputError(f"The array {name} in {reader.folder} {problem}")
        progress.add(sizes[name])
        return array

    sizes = {name: math.prod(leaf.shape) * leaf.dtype.itemsize for name, leaf in expected.items()}
    label = f"restoring {reader.folder.name}"
    with (
        WorkProgress(label, sum(sizes.values()), show=is_primary()) as progress,
        ThreadPoolExecutor(_THREADS, "restore") as pool,
    ):
        return dict(zip(expected, pool.map(load, expected), strict=True))


def _compare(folder: Path, manifest: Manifest, arrays: Mapping[str, jax.Array], digests: Digests) -> None:
    """Raise `Damaged` if an array does not match its checksums.

    Each process checks the shards on its devices and its assigned share of the rest, so together the processes check
    every part of every array.
    """
    wrong, not_held = differing(arrays, digests)
    if wrong:
        raise Damaged(f"The array {wrong[0]} in {folder} does not match its checksum.")
    assigned = read_digests(folder, manifest, jax.process_index(), jax.process_count())
    unread: Digests = {}
    for name, places in not_held.items():
        unread[name] = {span: text for span, text in assigned.get(name, {}).items() if span in places}
    for sentence in wrong_parts(CheckpointReader(folder, manifest.leaves, manifest.files), unread):
        raise Damaged(sentence)
