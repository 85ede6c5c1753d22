"""The process of a training command: its progress record, and its end, with which its job ends."""

import threading
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from zaya_jax.errors import ExitCode, Preempted, exit_message, exit_reason
from zaya_jax.run.checkpoints import CHECKPOINTS, named_steps
from zaya_jax.run.files import expanded
from zaya_jax.run.progress_record import record_from_environment
from zaya_jax.run.signals import NAMES, say_and_exit, warn
from zaya_jax.run.status import mark_stopped

if TYPE_CHECKING:  # which imports jax
    from zaya_jax.job.peer_liveness import PeerLiveness


class TrainingProcess:
    """Ends this process, and every other process of its job, with the same one-sentence message."""

    def __init__(self) -> None:
        """Open the record of this process' supervisor, if it has one."""
        self.run_dir = ""  # empty until training starts
        self.peers: PeerLiveness | None = None  # the other processes of the job
        self.progress = record_from_environment()

    def stop(self, number: int) -> None:
        """Exit at once: there is nothing to save, or this is the second signal."""
        sentence, status = f"Stopped by {NAMES[number]}.{_saved(self.run_dir)}", ExitCode(128 + number)
        self.progress.end(status, sentence, is_origin=True)
        if self.run_dir:
            run = expanded(self.run_dir)
            writer = threading.Thread(target=mark_stopped, args=(run, status, sentence), daemon=True)
            writer.start()
            writer.join(1)  # not longer, since the file system may hang
        self.leave(Preempted(sentence, status))

    def end(self, error: BaseException) -> int:
        """Print why the run ends, and return the exit status."""
        if self.peers is not None:
            self.leave(error)
        sentence, status = self._record(error)
        warn(sentence)
        return status

    def leave(self, error: BaseException) -> NoReturn:
        """Print why the run ends, and end the job at once, from any thread."""
        leave = say_and_exit if self.peers is None else self.peers.leave
        leave(*self._record(error))

    def _record(self, error: BaseException) -> tuple[str, int]:
        sentence, status = exit_message(error)
        self.progress.end(status, sentence, is_origin=True, reason=exit_reason(error))  # only the first call counts
        return sentence, status

    def fail(self, error: Exception) -> NoReturn:
        """End the whole job after an error in this process, which the loss of another process may have caused."""
        if self.peers is None:
            self.progress.end(ExitCode.STOPPED, _describe(error), is_origin=True)
            raise error
        from zaya_jax.job.multihost import is_peer_loss

        if is_lost := is_peer_loss(error):
            self.peers.wait()  # until the peer timeout names the lost process, and ends this one
        else:
            traceback.print_exc()
        self.progress.end(ExitCode.STOPPED, _describe(error), is_origin=not is_lost)
        reason = (str(error).splitlines() or [type(error).__name__])[0][:300].removesuffix(".")
        self.peers.leave(f"Stopped: {reason}.{_saved(self.run_dir)}", ExitCode.STOPPED)


def _describe(error: Exception) -> str:
    """Describe an unexpected error by its type, message and the line that raised it."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {str(error)[:300]} ({Path(frame.filename).name}:{frame.lineno} in {frame.name})"


def _saved(run_dir: str) -> str:
    """Name the newest checkpoint, for the message of a run that ends without saving."""
    if not run_dir:
        return ""
    steps = named_steps(expanded(run_dir) / CHECKPOINTS)
    if not steps:
        return f" {run_dir} has no checkpoint yet: rerunning the command starts from the first step."
    return f" The newest checkpoint in {run_dir} is step {steps[-1]}: rerunning the command resumes from it."
