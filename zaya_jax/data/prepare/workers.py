"""Do jobs in worker processes. One that ends, as by an abort in a library, is replaced, and what ended it left out."""

import ctypes
import mmap
import multiprocessing
import os
import resource
import signal
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from zaya_jax.errors import RunStopped, is_expected
from zaya_jax.run.host_memory import free_memory
from zaya_jax.run.progress import WorkProgress
from zaya_jax.run.signals import interrupts_kept_from_children

_MOST_ENDS = 40  # of processes that others may have caused, such as one that took all memory
_PARENT_POLL = 0.2  # seconds
# Bytes that a worker process can allocate, within the machine's: what a few bytes of input stand for must not fill it.
_LEAST_MEMORY, _MOST_MEMORY = 2**31, 2**34


class Job(NamedTuple):
    """A unit to convert or check."""

    folder: Path
    number: int
    unit: Any
    size: int  # bytes, for progress
    fatal: Mapping[int, str] | None = None  # index of a document that ended processes → how; None: no process ended


_State = ctypes.c_longlong * 3  # see `Worker`
T = TypeVar("T")
E = TypeVar("E")
_Convert = Callable[[Job, Callable[[int], None]], T]  # the second argument adds bytes to the progress; picklable


def run_in_workers(
    jobs: Sequence[Job], convert: _Convert[T], count: int, limit: int, progress: WorkProgress, idle: list["Worker"]
) -> Iterator[tuple[int, T]]:
    """Do jobs in `count` processes, and yield the number and the result of each as it is done.

    `convert` goes through the documents of a job with `watch`; `limit` documents may end processes, and some more do no
    harm. Workers in `idle` are used first, and left there at the end; after an error, all are ended. `RunStopped` if a
    process ended that was not at work on a document, or too many did.
    """
    # Not forked, because this process can have threads, as in training.
    context = multiprocessing.get_context("spawn")
    waiting, ends, done = deque(jobs), Counter[tuple[int, int]](), [0]
    busy = dict[Any, Worker]()  # those at work by their pipe
    try:
        with progress.follow(lambda: sum(done) + sum(worker.state[1] for worker in list(busy.values()))):
            while waiting or busy:
                while waiting and len(busy) < count:
                    worker = idle.pop() if idle else Worker(context, count)
                    busy[worker.pipe] = worker
                    worker.begin(convert, waiting.popleft())
                for pipe in cast("list[Any]", wait(busy)):
                    worker = busy.pop(pipe)
                    try:
                        result = pipe.recv()
                    except (EOFError, OSError):
                        waiting.appendleft(_after_end(worker, ends, 3 * limit + _MOST_ENDS))
                        continue
                    idle.append(worker)
                    if isinstance(result, Exception):
                        raise result
                    done.append(worker.job.size)
                    yield worker.job.number, result
    except BaseException:
        end_workers([*idle, *busy.values()])
        idle.clear()
        raise


def end_workers(workers: Sequence["Worker"]) -> None:
    """End worker processes; those at work abandon their units."""
    for worker in workers:
        worker.state[_STOP] = 1
        worker.pipe.close()
    for worker in workers:
        worker.process.join()


class Worker:
    """A worker process, which does one job after the other."""

    def __init__(self, context: Any, count: int) -> None:
        self.job: Job  # what it does, or did last
        self.pipe, theirs = context.Pipe()
        memory = Connection(os.memfd_create("state"))  # unlike an `Array`, it needs no writable /dev/shm
        os.ftruncate(memory.fileno(), ctypes.sizeof(_State))
        # Number of the document that it works on, 0 while it reads; bytes of the job that are done; 1 to stop it.
        self.state = _map(memory)
        self.process = context.Process(target=_work, args=(theirs, memory, count, os.getpid()), daemon=True)
        with interrupts_kept_from_children():
            self.process.start()
        theirs.close()
        memory.close()

    def begin(self, convert: _Convert, job: Job) -> None:
        """Send it a job."""
        self.job, self.state[:] = job, (0, 0, 0)
        with suppress(OSError):  # it has ended, which reading from it tells
            self.pipe.send((convert, job))


def _map(memory: Connection) -> Any:
    return _State.from_buffer(mmap.mmap(memory.fileno(), ctypes.sizeof(_State)))


def _after_end(worker: Worker, ends: Counter[tuple[int, int]], most: int) -> Job:
    """Return what is left to do of the job of a worker that has ended: all of it, or all but what ended it twice."""
    worker.pipe.close()
    worker.process.join()
    job, status, number = worker.job, worker.process.exitcode or 0, worker.state[0]
    end = signal.Signals(-status).name if status < 0 else f"exit status {status}"
    ends[job.number, number] += 1
    if ends.total() > most or (not number and ends[job.number, number] > 1):
        raise RunStopped(
            f"A data worker process ended ({end}) reading {getattr(job.unit, 'files', [job.unit])[0]}: it was killed, "
            "perhaps by running out of memory, or a script starts the work without `if __name__ == '__main__':`. Rerun "
            "the command to resume."
        )
    fatal = dict(job.fatal or {})
    if ends[job.number, number] > 1:  # at first, others may be the cause, as when they took all memory
        # By a signal, as after a MemoryError, see `_work`, or when a library cannot allocate.
        advice = "; it may need more memory than each has: use fewer workers, or split it" if status < 0 else ""
        fatal[number - 1] = f"two processes that worked on it ended ({end}){advice}"
    return job._replace(fatal=fatal)


_STOP = 2  # index in a worker's state
_state: Any = [0, 0, 0]  # of a worker process, see `Worker`
_fatal: Mapping[int, str] | None = None  # see `Job`


def _work(pipe: Any, memory: Connection, count: int, parent: int) -> None:
    """Do the jobs that come from `pipe`, and send their results or errors back."""
    global _state, _fatal  # noqa: PLW0603 (of this process, which does one job at a time)
    if count > 1:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is already one process per core
    end_with_parent(parent)
    if resource.getrlimit(resource.RLIMIT_DATA) == (resource.RLIM_INFINITY, resource.RLIM_INFINITY):
        most = max(_LEAST_MEMORY, min(_MOST_MEMORY, free_memory() // count))
        resource.setrlimit(resource.RLIMIT_DATA, (most, resource.RLIM_INFINITY))
    state = _state = _map(memory)

    def add(count: int) -> None:
        if state[_STOP]:
            raise RunStopped("The work was stopped.")
        state[1] += count

    with suppress(EOFError, OSError):  # the parent needs no more
        while True:
            convert, job = pipe.recv()
            _fatal = job.fatal
            try:
                result = convert(job, add)
            except MemoryError:
                os.abort()  # as libraries do
            except Exception as error:
                if not is_expected(error):
                    error.add_note(traceback.format_exc())
                result = error
            pipe.send(result)


def watch(documents: Iterable[E], refuse: Callable[[E, str], E]) -> Iterator[E]:
    """Yield the documents of a job in order, and note which is in work, until the next is asked for.

    `refuse` returns what to yield in place of a document that ends worker processes; its second argument says how.
    """
    for index, document in enumerate(documents):
        _state[0] = index + 1
        yield refuse(document, _fatal[index]) if _fatal and index in _fatal else document
        _state[0] = 0


def is_repeated() -> bool:
    """Return whether a process ended at this job, so that documents are done one by one, to find which ended it."""
    return _fatal is not None


def end_with_parent(parent: int) -> None:
    """End this process soon after its parent process is gone."""

    def exit_after_parent() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_POLL)
        os._exit(1)

    threading.Thread(target=exit_after_parent, daemon=True).start()
