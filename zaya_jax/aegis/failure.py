"""Why an attempt to train ended: which process failed first, and of what."""

import dataclasses
import signal
from collections.abc import Sequence

from zaya_jax.aegis.observation import FaultClass, Observation, Severity
from zaya_jax.errors import REQUESTED, ExitCode, printable
from zaya_jax.run.progress_record import LastWords, Phase

UNKILLABLE = "unkillable"  # code of a process that SIGKILL does not end
# What a process says that could not join the others, see `parallel.rendezvous`, or whose predecessor still runs.
_NOT_MET = ("did not reach", "could not reach process 0", "before all", "received no answer", "closed the connection",
            "cannot listen", "could not be resolved", "is in use by another process")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class RankEnd:
    """How a process ended.

    Attributes:
      rank: index of the process.
      status: exit status, negative for a signal.
      time: of the end, of the supervisor's `time.monotonic`.
      step: number of steps done; -1 if it did not get that far.
      phase: what it did last.
      words: its last words; None if it left none.
      was_killed: whether the supervisor killed it.
    """

    rank: int
    status: int
    time: float
    step: int = -1
    phase: Phase = Phase.START
    words: LastWords | None = None
    was_killed: bool = False

    @property
    def followed(self) -> bool:
        """Whether it ended because another process was lost, by its own account."""
        return self.words is not None and not self.words.is_origin


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why an attempt ended.

    Attributes:
      fault: its class.
      code: name of what happened, such as 'signal-SIGKILL', 'exit-1' or 'hang-device_wait'.
      rank: the process that failed first; None if that is unknown or another node's.
      step: number of steps it had done; -1 if it did not get that far.
      words: its last sentence, or evidence; printable.
      progress: greatest number of steps that any process had done.
      device: the GPU that caused it; None if it is none, or that is unknown.
    """

    fault: FaultClass
    code: str
    rank: int | None
    step: int
    words: str = ""
    progress: int = -1
    device: int | None = None

    @property
    def same(self) -> tuple[str, str, int, str]:
        """What two failures of the same cause have in common."""
        return self.fault, self.code, self.step, self.words


def find_failure(ends: Sequence[RankEnd], observations: Sequence[Observation]) -> Failure | None:
    """Return why an attempt ended; None if all processes finished.

    The origin is the process that ended first among those that failed by themselves: not killed by the supervisor, and
    not because another was lost.

    Args:
      ends: of all processes of this node.
      observations: faults seen during the attempt, in order.
    """
    if all(end.status == 0 for end in ends):
        return None
    failed = [end for end in ends if end.status != 0 and not end.was_killed]
    progress = max(end.step for end in ends)
    if not failed:
        return Failure(FaultClass.PREEMPTION, "killed", None, progress, "", progress)
    origins = [end for end in failed if not end.followed]
    killed = [end for end in ends if end.was_killed]
    if not origins and len(killed) == 1:  # the others were right: it sent no heartbeat, and did not end
        end = killed[0]
        words = next(each.words.sentence for each in failed if each.words is not None)
        return Failure(
            FaultClass.HANG, f"hang-{end.phase.name.lower()}", end.rank, end.step, printable(words, 500), progress
        )
    if not origins:
        words = next(end.words.sentence for end in failed if end.words is not None)
        return Failure(FaultClass.CRASH, "peer-lost", None, progress, printable(words, 500), progress)
    origin = min(origins, key=lambda end: end.time if end.words is None else min(end.time, end.words.time_ns / 1e9))
    words = "" if origin.words is None else printable(origin.words.sentence, 500)
    cause = _cause(origin, observations)
    fault, code = _classify(origin, words, cause)
    device = None if cause is None or fault is not cause.fault else cause.device
    return Failure(fault, code, origin.rank, origin.step, words, progress, device)


def _classify(origin: RankEnd, words: str, cause: Observation | None) -> tuple[FaultClass, str]:
    """Return the class and code of the origin's end."""
    if origin.status in REQUESTED:
        return FaultClass.PREEMPTION, f"exit-{origin.status}"
    if cause is not None:
        return cause.fault, cause.code
    if origin.status == ExitCode.BAD_INPUT and any(text in words for text in _NOT_MET):
        return FaultClass.PEERS, "peers-missing"
    if origin.status == ExitCode.BAD_INPUT:
        return FaultClass.CONFIGURATION, "exit-2"
    if origin.status < 0:
        try:
            return FaultClass.CRASH, f"signal-{signal.Signals(-origin.status).name}"
        except ValueError:
            return FaultClass.CRASH, f"signal-{-origin.status}"
    return FaultClass.CRASH, "exception" if words else f"exit-{origin.status}"


def _cause(origin: RankEnd, observations: Sequence[Observation]) -> Observation | None:
    """Return the observed fault that explains the end; those of hardware before those of software."""
    severe = [each for each in observations if each.severity in (Severity.ERROR, Severity.FATAL)
              and each.rank in (None, origin.rank)]  # fmt: skip
    order = (FaultClass.GPU, FaultClass.HOST_MEMORY, FaultClass.DISK, FaultClass.CHECKPOINT, FaultClass.DEVICE_MEMORY,
             FaultClass.NETWORK, FaultClass.NON_FINITE, FaultClass.SPIKE)  # fmt: skip
    for fault in order:
        if fault is FaultClass.HOST_MEMORY and origin.status != -signal.SIGKILL:
            continue  # the out-of-memory killer sends SIGKILL
        if fault is FaultClass.DISK and origin.status < 0 and origin.status != -signal.SIGBUS:
            continue  # a trainer whose disk is full ends by itself, unless it writes to a mapped file
        for each in severe:
            if each.fault is fault:
                return each
    return None
