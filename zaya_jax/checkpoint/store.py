"""Asynchronous, verified and atomic saving; training continues while saves fail, up to a limit.

Every process writes its shards with Orbax, and their digests, computed in host memory. Process 0 then writes the
manifest, and finally renames the folder to the checkpoint's name.
"""

import contextlib
import dataclasses
import json
import os
import shlex
import shutil
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import jax

from zaya_jax.checkpoint.digest import ArrayPart, digests
from zaya_jax.checkpoint.leaves import named
from zaya_jax.checkpoint.local import LocalCopies
from zaya_jax.checkpoint.orbax_save import start_save
from zaya_jax.checkpoint.reader import CheckpointReader, wrong_parts
from zaya_jax.checkpoint.small_arrays import PackedArrays, pack_arrays
from zaya_jax.config import CheckpointConfig
from zaya_jax.errors import InputError, Reason, RunStopped, Superseded, as_sentence
from zaya_jax.job.multihost import all_gather, broadcast, is_primary
from zaya_jax.run import checkpoints as names
from zaya_jax.run.checkpoints import steps_to_keep
from zaya_jax.run.digests import joined, leaf_digest, uncovered
from zaya_jax.run.fencing import Fence, is_current
from zaya_jax.run.files import sync_folder, write_atomically
from zaya_jax.run.manifest import DIGESTS, Manifest, file_digests, list_files, try_read, write_manifest
from zaya_jax.run.writing import make_folder, open_file, remove, rename, resolved, share

_PATIENCE = 600  # seconds that processes wait for each other at the end of a save
_FAREWELL = 60  # seconds to wait for a save in progress after another error
_RETRY, _RETRY_MOST = 10.0, 300.0  # seconds to the next attempt after a failed save, doubled each time
_SPARE = 1.05  # required free space over the size of the arrays, for metadata


class SaveFailed(Exception):
    """A save failed; the message says why."""


@dataclasses.dataclass
class _Saving:
    """A save in progress."""

    step: int
    work: Path  # temporary folder
    metadata: dict[str, Any]
    parts: list[ArrayPart] = dataclasses.field(default_factory=list)
    packed: PackedArrays | None = None
    leaves: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)  # for the manifest
    wait: Callable[[], None] | None = None  # waits until the arrays are durable
    problem: str = ""  # why the save could not start in this process


class CheckpointStore:
    """Saves and retains checkpoints in the folder `checkpoints/` of a run, for the processes that train it.

    Every method raises `Superseded` when it is about to write after other processes have resumed the run.

    Attributes:
      folder: of the checkpoints.
      say: prints one sentence about a problem.
      fence: the fencing token of these processes, in process 0.
    """

    def __init__(
        self, folder: Path, config: CheckpointConfig, pinned: Collection[int] = (),
        say: Callable[[str], object] = print, leave: Callable[[Superseded], object] = lambda error: None,
    ) -> None:  # fmt: skip
        """Open the folder, which need not exist; nothing is written yet.

        Args:
          folder: on a file system that all processes share.
          config: when and what to save and keep.
          pinned: steps whose checkpoints are never removed.
          say: prints one sentence about a problem.
          leave: ends this process if other processes resume the run, see `Fence`.
        """
        self.folder = resolved(folder)
        self.say = say
        self.fence = Fence(self.folder, leave)
        self._config, self._pinned = config, set(pinned)
        self._pool = ThreadPoolExecutor(1, "checkpoint")
        self._token = 0
        self._newest: int | None = None  # the step from which these processes resumed
        self._in_flight: tuple[int, Future[None]] | None = None
        self._problem = ""  # of the last save, until one succeeds
        self._pause, self._again_at = _RETRY, 0.0
        self._failing_since: float | None = None
        self._verified: set[int] = set()
        self.local = LocalCopies(config.local_dir, self.folder)

    def __enter__(self) -> Self:
        """Wait for the last save at the end of a `with` block."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait for the save in progress; after an error, without communicating with other processes."""
        if kind is None:
            self.wait()
        elif self._in_flight is not None:
            with contextlib.suppress(Exception):
                self._in_flight[1].result(_FAREWELL)
        self._pool.shutdown(wait=kind is None)

    def steps(self) -> list[int]:
        """List the steps of finished checkpoints."""
        return names.saved_steps(self.folder)

    def latest(self) -> int | None:
        """Return the step of the newest finished checkpoint."""
        return max(self.steps(), default=None)

    def mark_verified(self, step: int) -> None:
        """Record that a checkpoint was read and is intact; it is kept until a newer one is verified."""
        self._verified.add(step)

    def take_over(self, step: int | None = None) -> None:
        """Take the next fencing token, which supersedes all other processes of this run.

        Also removes leftovers of unfinished saves, quarantines superseded checkpoints and applies retention, so that
        processes that keep ending early do not accumulate checkpoints.

        Args:
          step: from which these processes resume; newer checkpoints are quarantined too.
        """
        self._newest = step
        if problem := self._take_over():
            self._report(f"{problem} Training continues; the next save will try again.")

    def _take_over(self) -> str:
        problem, token = "", 0
        if is_primary():
            try:
                make_folder(self.folder)
                if left := names.clean(self.folder):
                    self.say("Unfinished saves take space and cannot be removed here, perhaps only by their owner: "
                             f"rm -r {shlex.join(map(str, left[:3]))}")  # fmt: skip
                token = self.fence.take(names.current_tokens(self.folder, self._newest, self.say)).number
                for step in self._verified.intersection(self.steps()):
                    with contextlib.suppress(FileNotFoundError):  # a superseded process has removed it meanwhile
                        os.close(open_file(self.folder / str(step) / names.VERIFIED, os.O_WRONLY))
                self._retain()
            except OSError as error:
                problem = f"{self.folder} cannot be written: {error.strerror}."
        message: list[Any] = [problem, token]
        problem, self._token = broadcast(message)
        return problem

    def save(self, step: int, state: Any, metadata: Mapping[str, Any], ready: Callable[[], str] = str) -> None:
        """Start saving; the arrays can be donated to the next step at once.

        Waits for the previous save first. A failed save is reported; retry it when `due` returns true, except at the
        end of a phase or of the process, which do not wait for the back-off (`backing_off`).

        Args:
          step: of the run; an existing checkpoint of this step is kept.
          state: a pytree of arrays.
          metadata: of the checkpoint, see `Manifest.metadata`; JSON.
          ready: called in process 0 to sync files that must not be older than the checkpoint; returns a message if
            that fails.

        Raises:
          RunStopped: saves have failed for longer than `checkpoint.max_unsaved_seconds`.
        """
        self.wait()
        arrays = named(state)
        problem = "" if self._token else self._take_over()
        work = self.folder / names.unfinished_name(step, self._token)
        if not problem:  # a single broadcast, since training waits for it
            size = sum(x.nbytes for x in arrays.values())
            problem = broadcast(self._why_not(step, work, size, ready) if is_primary() else "")
            if problem is None:
                return
        if problem:
            self._failed(step, problem)
            return
        saving = _Saving(step, work, dict(metadata))
        try:
            packed = pack_arrays(arrays)
            saving.parts = packed.large_parts() if self._config.verify != "none" else []
            self.local.stage(arrays)
            saving.wait = start_save(work, packed.arrays)
            saving.packed = packed._replace(arrays={})  # the next step may donate them
        except (ValueError, OSError, RuntimeError, MemoryError) as error:  # perhaps in this process only
            saving.problem = as_sentence(error)
        self._in_flight = (step, self._pool.submit(self._finish, saving))

    def _why_not(self, step: int, work: Path, size: int, ready: Callable[[], str]) -> str | None:
        """Return why `size` bytes cannot be saved to `work`; empty if they can, None if the step is saved already.

        Quarantines an unusable folder with the step's name.
        """
        path = self.folder / str(step)
        try:
            problem, manifest = self.fence.check(), try_read(path)
        except InputError as error:
            return str(error)
        if problem:
            return problem
        if manifest is not None and is_current(self.folder, step, manifest.fencing_token):
            return None
        if os.path.lexists(path):
            with contextlib.suppress(OSError):  # if it stays in the way, the end of the save reports it
                names.quarantine(self.folder, step, "corrupt" if manifest is None else "stale")
        return ready() or self._check_free_space(size) or self._remove_leftovers(work)

    def due(self) -> bool:
        """Return whether to retry a failed save now; the same in all processes.

        Raises:
          RunStopped: saves have failed for longer than `checkpoint.max_unsaved_seconds`.
        """
        if self._in_flight is None and not self._problem:
            return False
        is_retry = self._in_flight is None
        if self._is_waiting():
            return False
        self.wait()
        return is_retry

    def backing_off(self) -> bool:
        """Return whether a failed save is not yet due again; the same in all processes."""
        return bool(self._problem) and self._is_waiting()

    def finish(self, save: Callable[[], None], should_stop: Callable[[], bool]) -> bool:
        """Wait until the last save has succeeded, retrying with `save`, or until `should_stop()`.

        Returns:
          Whether it has succeeded.
        """
        self.wait()
        while broadcast(bool(self._problem)) and not should_stop():
            time.sleep(1)
            if self.due():
                save()
                self.wait()
        return not self._problem

    def _is_waiting(self) -> bool:
        """True if a save is in progress, or failed and not yet due again, according to process 0."""
        ready = time.monotonic() >= self._again_at if self._in_flight is None else self._in_flight[1].done()
        return not broadcast(ready)

    def wait(self) -> bool:
        """Wait for the save in progress; return whether the last save succeeded.

        Raises:
          RunStopped: saves have failed for longer than `checkpoint.max_unsaved_seconds`.
        """
        if self._in_flight is None:
            return not self._problem
        (step, future), self._in_flight = self._in_flight, None
        try:
            future.result()
        except SaveFailed as error:
            self._failed(step, str(error))
        except TimeoutError as error:
            raise RunStopped(f"The checkpoint of step {step} could not be saved: {error}") from error
        else:
            if self._problem:
                self._report(f"The checkpoint of step {step} is saved.")
            self._problem, self._pause, self._failing_since = "", _RETRY, None
        return not self._problem

    def _failed(self, step: int, problem: str) -> None:
        now = time.monotonic()
        self._failing_since = now if self._failing_since is None else self._failing_since
        failing_seconds = now - self._failing_since
        newest = self.latest()
        since = "there is no checkpoint yet" if newest is None else f"the newest checkpoint is that of step {newest}"
        if broadcast(failing_seconds > self._config.max_unsaved_seconds):
            raise RunStopped(f"The checkpoint of step {step} could not be saved: {problem} Saves have failed for "
                             f"{failing_seconds:.0f} s, more than checkpoint.max_unsaved_seconds "
                             f"({self._config.max_unsaved_seconds:g} s); {since}.", Reason.SAVE_FAILED)  # fmt: skip
        self._report(f"The checkpoint of step {step} could not be saved: {problem} Training continues; {since}. "
                     f"Retrying in about {self._pause:.0f} s.")  # fmt: skip
        self._problem, self._again_at = problem, time.monotonic() + self._pause
        self._pause = min(2 * self._pause, _RETRY_MOST)

    def _report(self, sentence: str) -> None:
        if is_primary():
            self.say(sentence)

    def _check_free_space(self, size: int) -> str:
        """Explain why `size` bytes cannot be saved; empty if they can. Applies retention if space is short."""
        need = round(size * _SPARE)
        try:
            make_folder(self.folder)
            if shutil.disk_usage(self.folder).free < need:
                names.clean(self.folder)
                self._retain()
            free = shutil.disk_usage(self.folder).free
        except OSError as error:
            return f"{self.folder} cannot be used: {error.strerror}."
        return "" if free >= need else f"{self.folder} has {free:,} bytes free, but {need:,} are needed."

    def _remove_leftovers(self, work: Path) -> str:
        """Remove leftovers of an earlier attempt; return why that, or writing there, is impossible."""
        try:
            for path in (work, *self.folder.glob(f"{work.name}.*tmp*")):
                remove(path)
            # If Orbax cannot create its folder, its threads hang and keep the process from exiting.
            work.mkdir()
            work.rmdir()
        except OSError as error:
            return f"{work} cannot be written: {error.strerror}."
        return ""

    def _finish(self, saving: _Saving) -> None:
        """Finish a save in a background thread of each process."""
        problem, verifying = saving.problem, self._config.verify != "none"
        try:
            if saving.wait is None or saving.packed is None:
                raise SaveFailed(problem)
            saving.leaves = saving.packed.leaves()
            if verifying:
                saving.parts += saving.packed.small_parts()
            own_digests = digests(saving.parts)
            saving.wait()
            if verifying:
                folder = saving.work / DIGESTS
                make_folder(folder)
                write_atomically(folder / f"process_{jax.process_index()}.json", json.dumps(own_digests))
                sync_folder(folder)
            saving.parts.clear()
            if self._config.verify == "readback":
                problem = next(wrong_parts(CheckpointReader(saving.work, saving.leaves), own_digests), "")
        except Exception as error:  # training continues after any error
            problem = as_sentence(error)
        problems = [text for text in all_gather("saved", problem, _PATIENCE) if text]
        verdict = ""
        if is_primary():
            verdict = self.fence.check() or problems[0] if problems else self._commit(saving)
        verdict = all_gather("kept", verdict, _PATIENCE)[0]
        if verdict:
            self.local.discard()
            if is_primary():
                self._remove_leftovers(saving.work)
            raise SaveFailed(verdict)
        if self._config.verify == "readback":
            self._verified.add(saving.step)
        self.fence.check()
        if problem := self.local.commit(saving.step):
            (self.say if is_primary() else print)(problem)  # local disks differ between processes
        if is_primary():
            self._retain()

    def _commit(self, saving: _Saving) -> str:
        """Write the manifest and rename the folder to its final name; return a message if that fails."""
        try:
            verifying, shapes = self._config.verify != "none", {name: x["shape"] for name, x in saving.leaves.items()}
            taken = joined(json.loads(path.read_bytes()) for path in sorted((saving.work / DIGESTS).glob("*.json")))
            if verifying and (unseen := uncovered(taken, shapes)):
                return f"{saving.work} lacks digests of {unseen[0]}. Check that all processes see the same run_dir."
            leaves = {name: leaf | ({"digest": leaf_digest(taken[name])} if name in taken else {})
                      for name, leaf in saving.leaves.items()}  # fmt: skip
            write_manifest(saving.work, Manifest(
                saving.step, self._token, saving.metadata, leaves, list_files(saving.work),
                file_digests(saving.work) if verifying else {}, self._config.verify == "readback",
            ))  # fmt: skip
            if problem := self.fence.check():
                return problem
            share(saving.work)
            rename(saving.work, self.folder / str(saving.step))
            sync_folder(self.folder)
        except (OSError, ValueError) as error:
            return as_sentence(error)
        return ""

    def _retain(self) -> None:
        """Apply retention in process 0; checkpoints that cannot be removed stay."""
        self.fence.check()
        with contextlib.suppress(OSError):
            usable = names.usable_checkpoints(self.folder)
            kept = steps_to_keep(usable, self._config, self._verified) | self._pinned
            for checkpoint in usable:
                if checkpoint.step not in kept:
                    names.remove(self.folder, checkpoint.step)
