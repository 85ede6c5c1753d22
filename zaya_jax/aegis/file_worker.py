"""A thread for the files of the run folder: if their server is silent, the supervisor still watches its processes."""

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from typing import TypeVar

_T = TypeVar("_T")
_MOST_WAITING = 10_000  # jobs; more are refused, so that a file system that stays silent costs little memory


class FileWorker:
    """Does jobs one after the other, in a thread that ends with the process whatever it waits for."""

    def __init__(self) -> None:
        self._jobs = queue.Queue[Callable[[], object]](_MOST_WAITING)
        self.refuses = False  # whether no job is done any more
        self._since: float | None = None  # start of the job that runs, of `time.monotonic`
        threading.Thread(target=self._work, name="files", daemon=True).start()

    def submit(self, job: Callable[[], _T]) -> Future[_T]:
        """Queue `job`; the result has what it returns or raises, `OSError` if too many jobs wait."""
        result: Future[_T] = Future()

        def work() -> None:
            try:
                if self.refuses:
                    raise OSError("Other processes have resumed the run.")
                result.set_result(job())
            except BaseException as error:
                result.set_exception(error)

        try:
            self._jobs.put_nowait(work)
        except queue.Full:
            result.set_exception(OSError("The run folder does not answer."))
        return result

    def refuse(self) -> None:
        """Do no job from now on, not even those that wait: the folder belongs to others."""
        self.refuses = True

    @property
    def silent_seconds(self) -> float:
        """For how long the job that runs has been running; 0 if none runs."""
        since = self._since
        return 0.0 if since is None else time.monotonic() - since

    def finish(self, seconds: float) -> bool:
        """Wait at most `seconds` for all jobs; return whether they are done."""
        result = self.submit(lambda: None)
        return bool(wait_for([result], seconds).done) and result.exception() is None

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            self._since = time.monotonic()
            job()
            self._since = None
