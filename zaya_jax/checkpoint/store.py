"""Asynchronous, verified and atomic saving; training continues while saves fail, up to a limit.

Every process writes its shards with Orbax, and their digests, computed in host memory. Process 0 then writes the
manifest, and finally renames the folder to the checkpoint's name.
"""

import contextlib
import os
import shlex
import shutil
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from zaya_jax.checkpoint.arrays import named
from zaya_jax.checkpoint.local import LocalCopies
from zaya_jax.checkpoint.orbax_save import Saving
from zaya_jax.config import CheckpointConfig
from zaya_jax.errors import InputError, Reason, RunStopped, Superseded, as_sentence
from zaya_jax.job.multihost import all_gather, broadcast, is_primary
from zaya_jax.run import checkpoints as names
from zaya_jax.run.checkpoints import steps_to_keep
from zaya_jax.run.fencing import Fence, is_current
from zaya_jax.run.files import sync_folder
from zaya_jax.run.manifest import try_read
from zaya_jax.run.writing import make_folder, open_file, remove, rename, resolved, share

_PATIENCE = 600  # seconds that processes wait for each other at the end of a save
_LAST_WAIT = 60  # seconds to wait for a save in progress after another error
_RETRY, _RETRY_MOST = 10.0, 300.0  # seconds to the next attempt after a failed save, doubled each time
_SPARE = 1.05  # required free space over the size of the arrays, for metadata


class CheckpointStore(contextlib.AbstractContextManager["CheckpointStore"]):
    """Saves and retains checkpoints in the folder `checkpoints/` of a run, for the processes that train it.

    A context manager, which waits for the save in progress; after an error, without communicating with other processes.
    Every method raises `Superseded` when it is about to write after other processes have resumed the run. `save`, `due`
    and `wait` raise `RunStopped` once saves have failed for longer than `checkpoint.max_unsaved_seconds`.
    """

    def __init__(
        self,
        folder: Path,
        config: CheckpointConfig,
        pinned: Collection[int] = (),
        say: Callable[[str], object] = print,
        leave: Callable[[Superseded], object] = lambda error: None,
    ) -> None:
        """Open the folder, which need not exist and which all processes share; nothing is written yet.

        Checkpoints of `pinned` steps are never removed. `say` prints one sentence about a problem. `leave` ends this
        process if other processes resume the run, see `Fence`.
        """
        self.folder, self.say = resolved(folder), say
        self.fence = Fence(self.folder, leave)
        self.local = LocalCopies(config.local_dir, self.folder)
        self._config, self._pinned = config, set(pinned)
        self._pool = ThreadPoolExecutor(1, "checkpoint")
        self._token = 0  # the fencing token of these processes
        self._newest: int | None = None  # the step from which these processes resumed
        self._in_flight: tuple[int, Future[str]] | None = None  # step, and why its save failed
        self._problem = ""  # of the last save, until one succeeds
        self._pause, self._again_at = _RETRY, 0.0
        self._failing_since: float | None = None
        self.verified: set[int] = set()  # steps of checkpoints that were read and are intact; the newest one is kept

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.wait()
        elif self._in_flight is not None:
            with contextlib.suppress(Exception):
                self._in_flight[1].result(_LAST_WAIT)
        self._pool.shutdown(wait=kind is None)

    def steps(self) -> list[int]:
        """List the steps of finished checkpoints."""
        return names.saved_steps(self.folder)

    def latest(self) -> int | None:
        """Return the step of the newest finished checkpoint."""
        return max(self.steps(), default=None)

    def take_over(self, step: int | None = None) -> None:
        """Take the next fencing token, which supersedes all other processes of this run.

        Also removes leftovers of unfinished saves, quarantines superseded checkpoints and those after `step`, where
        these processes resume, and applies retention: processes that keep ending early would accumulate them.
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
                    problem = "Unfinished saves take space and cannot be removed here, perhaps only by their owner"
                    self.say(f"{problem}: rm -r {shlex.join(map(str, left[:3]))}")
                token = self.fence.take(names.current_tokens(self.folder, self._newest, self.say)).number
                for step in self.verified.intersection(self.steps()):
                    with contextlib.suppress(FileNotFoundError):  # a superseded process has removed it meanwhile
                        os.close(open_file(self.folder / str(step) / names.VERIFIED, os.O_WRONLY))
                self._retain()
            except OSError as error:
                problem = f"{self.folder} cannot be written: {error.strerror}."
        message: list[Any] = [problem, token]
        problem, self._token = broadcast(message)
        return problem

    def save(self, step: int, state: Any, metadata: Mapping[str, Any], ready: Callable[[], str] = str) -> None:
        """Start saving a pytree of arrays; they can be donated to the next step at once. See `Manifest.metadata`.

        Waits for the previous save first. A failed save is reported; retry it when `due` returns true, except at the
        end of a phase or of the process, which do not wait for the back-off (`backing_off`). An existing checkpoint of
        `step` is kept. In process 0, `ready` syncs files that must not be older than the checkpoint, and returns why
        that failed.
        """
        self.wait()
        arrays = named(state)
        problem = "" if self._token else self._take_over()
        work = self.folder / f"{step}.g{self._token}"
        if not problem:  # a single broadcast, since training waits for it
            size = sum(x.nbytes for x in arrays.values())
            problem = broadcast(self._why_not(step, work, size, ready) if is_primary() else "")
        if problem:
            self._failed(step, problem)
        if problem != "":
            return
        try:
            self.local.stage(arrays)
            saving: Saving | str = Saving(work, arrays, self._config.verify)
        except (ValueError, OSError, RuntimeError, MemoryError) as error:  # perhaps in this process only
            saving = as_sentence(error)
        self._in_flight = (step, self._pool.submit(self._finish, step, work, saving, dict(metadata)))

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
        """Return whether to retry a failed save now; the same in all processes."""
        is_retry = self._in_flight is None
        if (is_retry and not self._problem) or self._is_waiting():
            return False
        self.wait()
        return is_retry

    def backing_off(self) -> bool:
        """Return whether a failed save is not yet due again; the same in all processes."""
        return bool(self._problem) and self._is_waiting()

    def finish(self, save: Callable[[], None], should_stop: Callable[[], bool]) -> bool:
        """Wait until the last save has succeeded, retrying with `save`, or until `should_stop()`; return whether."""
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
        """Wait for the save in progress; return whether the last save succeeded."""
        if self._in_flight is not None:
            (step, future), self._in_flight = self._in_flight, None
            try:
                problem = future.result()
            except TimeoutError as error:
                raise RunStopped(f"The checkpoint of step {step} could not be saved: {error}") from error
            if problem:
                self._failed(step, problem)
            else:
                if self._problem:
                    self._report(f"The checkpoint of step {step} is saved.")
                self._problem, self._pause, self._failing_since = "", _RETRY, None
        return not self._problem

    def _failed(self, step: int, problem: str) -> None:
        now, newest, most = time.monotonic(), self.latest(), self._config.max_unsaved_seconds
        self._failing_since = now if self._failing_since is None else self._failing_since
        failing = now - self._failing_since
        since = "there is no checkpoint yet" if newest is None else f"the newest checkpoint is that of step {newest}"
        if broadcast(failing > most):
            limit = f"{failing:.0f} s, more than checkpoint.max_unsaved_seconds ({most:g} s)"
            stopped = (
                f"The checkpoint of step {step} could not be saved: {problem} Saves have failed for {limit}; {since}."
            )
            raise RunStopped(stopped, Reason.SAVE_FAILED)
        retry = f"{since}. Retrying in about {self._pause:.0f} s."
        self._report(f"The checkpoint of step {step} could not be saved: {problem} Training continues; {retry}")
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
            if (free := shutil.disk_usage(self.folder).free) < need:
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

    def _finish(self, step: int, work: Path, saving: Saving | str, metadata: dict[str, Any]) -> str:
        """Finish a save in a background thread of each process; return why it failed in any of them."""
        problem = saving if isinstance(saving, str) else saving.complete()
        problems = [text for text in all_gather("saved", problem, _PATIENCE) if text]
        if is_primary():
            if problems or isinstance(saving, str):
                problem = self.fence.check() or problems[0]
            else:
                problem = self._commit(step, work, saving, metadata)
        problem = all_gather("kept", problem, _PATIENCE)[0]
        if problem:
            self.local.discard()
            if is_primary():
                self._remove_leftovers(work)
            return problem
        if self._config.verify == "readback":
            self.verified.add(step)
        self.fence.check()
        if warning := self.local.commit(step):
            (self.say if is_primary() else print)(warning)  # local disks differ between processes
        if is_primary():
            self._retain()
        return ""

    def _commit(self, step: int, work: Path, saving: Saving, metadata: dict[str, Any]) -> str:
        """Write the manifest and rename the folder to its final name; return a message if that fails."""
        try:
            if problem := saving.write_manifest(step, self._token, metadata) or self.fence.check():
                return problem
            share(work)
            rename(work, self.folder / str(step))
            sync_folder(self.folder)
        except (OSError, ValueError) as error:
            return as_sentence(error)
        return ""

    def _retain(self) -> None:
        """Apply retention in process 0; checkpoints that cannot be removed stay."""
        self.fence.check()
        with contextlib.suppress(OSError):
            usable = names.usable_checkpoints(self.folder)
            kept = steps_to_keep(usable, self._config, self.verified) | self._pinned
            for checkpoint in usable:
                if checkpoint.step not in kept:
                    names.remove(self.folder, checkpoint.step)
