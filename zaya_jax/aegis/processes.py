"""The trainer's processes of one attempt: started in sessions of their own, watched, and ended without a trace."""

import contextlib
import ctypes
import dataclasses
import functools
import os
import select
import selectors
import signal
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import IO, cast

import psutil

from zaya_jax.aegis.failure import RankEnd
from zaya_jax.aegis.output import Output, Stream
from zaya_jax.run import standby
from zaya_jax.run.progress_record import NAME, SIZE, VARIABLE, ExitRecord, Phase, Progress, read_progress

KILL_SECONDS = 60.0  # that the kernel may take to end a process after SIGKILL
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True)

Process = tuple[Sequence[str], Mapping[str, str]]  # command and environment


class Rank:
    """One process of the trainer."""

    def __init__(
        self, index: int, process: Process, outputs: Sequence[Output], *, expects_record: bool = False
    ) -> None:
        """Start a process as number `index`; its output goes to `outputs`, stdout and stderr.

        With `expects_record` it must keep a progress record: without one it has not finished, whatever it returns.
        """
        self.index, self._expects_record = index, expects_record
        self.end: RankEnd | None = None  # how it ended; None while it runs
        self.killed = False  # whether the supervisor has killed it
        self.is_lost = False  # whether it is killed because its trainer had failed
        self._record = os.memfd_create(NAME, os.MFD_CLOEXEC)
        os.truncate(self._record, SIZE)
        path = f"/proc/{os.getpid()}/fd/{self._record}"
        self._variable = os.fsencode(f"{VARIABLE}={path}")
        # What a script has trained, one after the other: by run, and 0 for what ended before it trained.
        self._unfinished: dict[int, Progress] = {}
        self._finished: Progress | None = None  # the last
        self._trainer = (-1, -1)  # pid and pidfd of the process that keeps the record, once it is known
        command, environment = process
        variables = {**environment, VARIABLE: path, "PYTHONUNBUFFERED": "1"}
        try:
            # What runs between fork and exec calls prctl and getppid, and takes no lock that another thread may hold.
            self.process = subprocess.Popen(  # noqa: S603 (an argument list, without a shell)
                list(command),
                env=variables,
                stdin=subprocess.PIPE if standby.VARIABLE in variables else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                preexec_fn=functools.partial(die_with_parent, os.getpid()),  # noqa: PLW1509
            )
        except BaseException:
            os.close(self._record)
            raise
        try:
            pipes = cast("list[IO[bytes]]", [self.process.stdout, self.process.stderr])
            self.streams = [Stream(os.dup(pipe.fileno()), output) for pipe, output in zip(pipes, outputs, strict=True)]
            for pipe in pipes:
                pipe.close()
            self.exit = os.pidfd_open(self.process.pid)  # becomes readable when it ends
        except OSError:  # no descriptor is left: the next attempt must not find it running
            self.process.kill()
            self.process.wait()
            os.close(self._record)
            raise

    @property
    def progress(self) -> Progress | None:
        """The trainer's progress, by its own record; None if no process that was given the record has written to it."""
        progress = read_progress(self._record)
        if progress is None or (self.end is None and not self._keeps_record(progress.pid)):
            return None
        before = read_progress(self._record, before=True)  # which may have ended since the last call
        if before is not None:
            self._note_run(before)
        self._note_run(progress)
        return progress

    def _note_run(self, progress: Progress) -> None:
        """Remember whether a run of the script has finished; may be repeated, in the same order."""
        has_failed = progress.exit_record is not None and progress.exit_record.status != 0
        if progress.first_step >= 0:
            self._unfinished.pop(0, None)  # it was tried again
            self._unfinished[progress.run] = progress
            if progress.phase >= Phase.FINISH and not has_failed:
                self._finished = self._unfinished.pop(progress.run)
        elif has_failed and self._finished is None:
            self._unfinished.setdefault(0, progress)

    def _keeps_record(self, pid: int) -> bool:
        """Return whether a process was started with this record, in whatever session (setsid, srun), or has ended."""
        if pid == self._trainer[0]:
            return True
        try:
            file = os.pidfd_open(pid)
        except (OSError, OverflowError) as error:
            return isinstance(error, ProcessLookupError)  # it ended just now
        try:  # once: while it hangs in a page fault, the kernel lets a reader of its environment wait
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:  # another user's, or of a program with capabilities
            environment = b""
        if pid != self.process.pid and self._variable not in environment.split(b"\0"):
            has_ended = bool(select.select([file], [], [], 0)[0])  # and waits to be reaped
            os.close(file)
            return has_ended
        self._forget_trainer()
        self._trainer = pid, file
        return True

    def _forget_trainer(self) -> None:
        if self._trainer[0] >= 0:
            os.close(self._trainer[1])
        self._trainer = (-1, -1)

    def note_end(self, seconds: float | None = None) -> RankEnd:
        """Wait at most `seconds` for the end of the process (`TimeoutExpired`), reap it, and return how it ended."""
        status, progress = self.process.wait(seconds), self.progress
        if self._unfinished:  # the last run, or else the first, which its script did not mind
            run = 0 if progress is None else progress.run
            progress = self._unfinished.get(run) or next(iter(self._unfinished.values()))
        elif self._finished is not None and progress is not None and progress.first_step < 0:
            progress = self._finished  # another command came after it
        end = RankEnd(self.index, status, time.monotonic(), was_killed=self.killed, expects_record=self._expects_record)
        if progress is not None:
            step = progress.step if progress.first_step >= 0 else -1
            end = dataclasses.replace(end, step=step, phase=progress.phase, record=progress.exit_record)
            end = dataclasses.replace(end, has_progress=True, is_wrapped=progress.pid != self.process.pid)
        self.end = end
        return end

    @property
    def exit_record(self) -> ExitRecord | None:
        """The exit record of the trainer, which may not have ended; None if it has left none."""
        progress = self.progress
        return None if progress is None else progress.exit_record

    @property
    def has_lost_trainer(self) -> bool:
        """True if the command runs on although the trainer behind it has failed."""
        return self.outlives_trainer and ((record := self.exit_record) is None or record.status != 0)

    @property
    def outlives_trainer(self) -> bool:
        """True if the command runs on although the trainer behind it has ended, as a script that then evaluates."""
        is_wrapped = self._trainer[0] not in (-1, self.process.pid)
        return self.end is None and is_wrapped and self.running_trainer is None

    @property
    def running_trainer(self) -> int | None:
        """File descriptor that becomes readable when the trainer ends; None if it has, or keeps no record."""
        file = self._trainer[1]
        return None if file < 0 or select.select([file], [], [], 0)[0] else file

    def send(self, number: int) -> None:
        """Send a signal to the trainer itself, not to a shell around it or to its data workers."""
        trainer = None if self.progress is None else self.running_trainer
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.exit if trainer is None else trainer, number)

    def kill(self) -> None:
        """Kill the whole session, data workers included, and a trainer that has left it."""
        self.killed = self.killed or (self.end is None and not (self.is_lost or self.has_lost_trainer))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        if (trainer := self.running_trainer) is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(trainer, signal.SIGKILL)

    def close(self) -> None:
        """Close all file descriptors of an ended process."""
        for stream in self.streams:
            stream.close()
        self._forget_trainer()
        if self.process.stdin is not None:
            self.process.stdin.close()
        os.close(self.exit)
        os.close(self._record)


class ProcessGroup:
    """The processes of one attempt, and a selector that waits for their output and end."""

    def __init__(self, processes: Sequence[Process], outputs: Sequence[Output], *, expects_records: bool) -> None:
        """Start `processes`, see `Rank`; raises `OSError` if one cannot be started."""
        self.selector = selectors.DefaultSelector()
        self.ranks: list[Rank] = []
        self.final_progress: Progress | None = None  # of the first process, once closed
        self.stuck: list[int] = []  # processes that SIGKILL did not end
        try:
            for index, process in enumerate(processes):
                self.ranks.append(Rank(index, process, outputs, expects_record=expects_records))
        except OSError:
            self.kill()
            self.close()
            raise
        for rank in self.ranks:
            self.selector.register(rank.exit, selectors.EVENT_READ, rank)
            for stream in rank.streams:
                self.selector.register(stream.file, selectors.EVENT_READ, (rank, stream))

    @property
    def running(self) -> list[Rank]:
        """The processes that have not ended."""
        return [rank for rank in self.ranks if rank.end is None]

    @property
    def ends(self) -> list[RankEnd]:
        """The ends of the processes that have ended."""
        return [rank.end for rank in self.ranks if rank.end is not None]

    def wait(self, seconds: float) -> list[tuple[Rank, bytes]]:
        """Wait for output or the end of a process, note the end, and return the lines that were written."""
        lines = []
        for key, _ in self.selector.select(seconds):
            if isinstance(key.data, Rank):
                self.selector.unregister(key.fileobj)
                if (trainer := key.data.running_trainer) is None:
                    key.data.note_end()
                else:  # a shell that a signal has ended, and its trainer, which saves
                    self.selector.register(trainer, selectors.EVENT_READ, key.data)
            elif isinstance(key.data, tuple):
                rank, stream = key.data
                lines += [(rank, line) for line in stream.read()]
                if not stream.is_open:
                    self.selector.unregister(key.fd)
        return lines

    def kill(self) -> None:
        """Kill every process that still runs, and wait for their ends."""
        for rank in self.ranks:
            rank.kill()
        deadline = time.monotonic() + KILL_SECONDS
        for rank in self.running:
            try:
                rank.note_end(max(deadline - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:  # it waits in the kernel, for a driver or a file server
                self.stuck.append(rank.index)
                rank.end = RankEnd(rank.index, -signal.SIGKILL, time.monotonic(), was_killed=True)

    def close(self) -> None:
        """Kill what is left of the sessions, read the rest of the output, and close everything."""
        self.kill()
        for rank in self.ranks:
            for stream in rank.streams:
                if stream.is_open:
                    stream.read()
            self.final_progress = self.final_progress or rank.progress
            rank.close()
        self.selector.close()


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when `parent` ends; to be called between fork and exec."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of all descendants whose parents end, so that none of them is left running."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def kill_orphans(spared: Collection[int]) -> None:
    """Kill and reap descendants that left the sessions of the trainer's processes; `spared` are pids to leave alone."""
    orphans = [child for child in psutil.Process().children(recursive=True) if child.pid not in spared]
    for orphan in orphans:
        with contextlib.suppress(psutil.NoSuchProcess):
            orphan.kill()
    psutil.wait_procs(orphans, timeout=1.0)


def describe_process(pid: int, root: Path = Path("/proc")) -> str:
    """Return what the kernel knows of a process: state, memory, threads, where it waits."""
    text = []
    for name in ("status", "wchan", "syscall", "io"):
        with contextlib.suppress(OSError):
            text.append(f"--- {name}\n{(root / str(pid) / name).read_text(encoding='utf-8', errors='replace')[:4096]}")
    return "\n".join(text)
