"""Why an attempt to train ended: which process failed first, and of what.

Exit records of the processes decide, then exit statuses and the machine. Lines of output explain a failure only.
"""

import dataclasses
import enum
import signal
from collections.abc import Sequence

from zaya_jax.errors import REQUESTED, ExitCode, Reason, printable
from zaya_jax.run.progress_record import ExitRecord, Phase


class FaultClass(enum.StrEnum):
    """The kind of a fault, after which policies name their rules."""

    HANG = "hang"  # no progress for longer than the phase's timeout
    CRASH = "crash"  # a process ended by a signal or with an error
    NETWORK = "network"  # a network link is down or flaps
    PEERS = "peers"  # the processes of other nodes do not come back
    GPU = "gpu"  # memory errors, resets and losses of a GPU, or other broken hardware of the node
    NON_FINITE = "non_finite"  # gradients that are not finite
    SPIKE = "spike"  # the loss left its recent range
    STRAGGLER = "straggler"  # one process is slower than the others
    PREEMPTION = "preemption"  # the scheduler or a person asked the run to end
    HOST_MEMORY = "host_memory"  # the machine or its cgroup ran out of memory
    DEVICE_MEMORY = "device_memory"  # a GPU ran out of memory
    CHECKPOINT = "checkpoint"  # no checkpoint can be restored, or saving fails
    DISK = "disk"  # a disk is full or fails
    CONFIGURATION = "configuration"  # the command or its configuration is invalid


class Severity(enum.StrEnum):
    """The severity of an observation."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"
    FATAL = "fatal"


@dataclasses.dataclass(frozen=True)
class Observation:
    """A fault, or a sign of one."""

    code: str  # stable name of what was observed, such as 'gpu-uncorrectable-ecc'
    fault: FaultClass  # its class
    severity: Severity  # how bad it is
    text: str = ""  # evidence as printable text of at most 500 characters, such as the line of a log
    rank: int | None = None  # process that it concerns; None for the machine
    good_steps: int | None = None  # number of steps done before the fault; None if it is not one of the training
    device: int | None = None  # GPU that it concerns; None for any other part of the machine

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", printable(self.text, 500))

    @property
    def is_severe(self) -> bool:
        """True if it is an error that may end a run."""
        return self.severity in (Severity.ERROR, Severity.FATAL)


UNKILLABLE = "unkillable"  # code of a process that SIGKILL does not end
MORE_NODES = "more-nodes"  # code of an attempt that ends only because more nodes can train
SUPERSEDED = "superseded"  # code of a run that other processes have resumed
SKIPPED = "too-many-skipped-steps"  # code of a trainer that stopped itself
_REASONS = {
    Reason.PEERS_MISSING: (FaultClass.PEERS, "peers-missing"),
    Reason.NO_CHECKPOINT: (FaultClass.CHECKPOINT, "no-checkpoint"),
    Reason.NOT_FINITE: (FaultClass.NON_FINITE, SKIPPED),
    Reason.SPIKE: (FaultClass.SPIKE, SKIPPED),
    Reason.DISK: (FaultClass.DISK, "disk-error"),
    Reason.SAVE_FAILED: (FaultClass.DISK, "saves-failed"),
    Reason.HOST_MEMORY: (FaultClass.HOST_MEMORY, "host-out-of-memory"),
    Reason.DEVICE_MEMORY: (FaultClass.DEVICE_MEMORY, "device-out-of-memory"),
}
_NO_GPU = (Reason.NO_CHECKPOINT, Reason.DISK, Reason.SAVE_FAILED)  # what no GPU causes


@dataclasses.dataclass(frozen=True)
class RankEnd:
    """The end of a process."""

    rank: int  # index of the process
    status: int  # exit status of the command, negative for a signal
    time: float  # of the end, of the supervisor's `time.monotonic`
    step: int = -1  # number of steps done; -1 if it did not get that far
    phase: Phase = Phase.START  # what it did last
    record: ExitRecord | None = None  # its exit record; None if it left none
    has_progress: bool = False  # whether a trainer of zaya_jax kept a progress record
    is_wrapped: bool = False  # whether that trainer was another process than the command, such as one behind a shell
    was_killed: bool = False  # whether the supervisor killed it
    expects_record: bool = False  # whether a trainer must have kept a progress record, as in a training command

    @property
    def outcome(self) -> int | None:
        """The exit status that counts; None if a trainer ended without an exit record, or not as that says.

        It is the trainer's by its exit record, whatever a program around it returns; without a trainer, the command's.
        """
        if not self.has_progress:
            return None if self.expects_record and self.status == 0 else self.status
        if self.record is None or (self.record.status and not self.is_wrapped and self.record.status != self.status):
            return None
        return self.record.status

    @property
    def words(self) -> str:
        """The sentence of its exit record, printable; empty if it left none."""
        return "" if self.record is None else printable(self.record.sentence, 500)


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why an attempt ended."""

    fault: FaultClass  # its class
    code: str  # name of what happened, such as 'signal-SIGKILL', 'exit-1' or 'hang-device_wait'
    rank: int | None  # the process that failed first; None if that is unknown or another node's
    step: int  # number of steps it had done; -1 if it did not get that far
    words: str = ""  # the sentence of its exit record, or evidence; printable
    progress: int = -1  # greatest number of steps that any process had done
    device: int | None = None  # the GPU that caused it; None if it is none, or that is unknown
    explanation: str = ""  # a line of output that may tell more; it decides nothing

    @property
    def same(self) -> tuple[str, str, int, str]:
        """A key that failures of the same cause share."""
        return self.fault, self.code, self.step, self.words


def find_failure(
    ends: Sequence[RankEnd],
    observations: Sequence[Observation],
    lines: Sequence[Observation] = (),
    *,
    is_saved: bool = True,
) -> Failure | None:
    """Return why an attempt with these `ends` of processes failed; None if all finished, and the last step `is_saved`.

    The origin is the process that ended first among those that failed by themselves: not killed by the supervisor, and
    not because another was lost. `observations` are faults of the machine; those from `lines` of output explain only.
    """
    progress = max(end.step for end in ends)
    if all(end.outcome == 0 for end in ends):
        words = "The processes finished, but the checkpoint of the last step is not saved."
        return None if is_saved else Failure(FaultClass.CRASH, "not-saved", None, progress, words, progress)
    for end in ends:
        if end.record is not None and end.record.status == ExitCode.SUPERSEDED:  # a restart would fence its successor
            return Failure(FaultClass.PREEMPTION, SUPERSEDED, end.rank, end.step, end.words, progress)
    failed = [end for end in ends if end.outcome != 0 and not end.was_killed]
    if not failed:
        return Failure(FaultClass.PREEMPTION, "killed", None, progress, "", progress)
    origins = [end for end in failed if end.record is None or end.record.is_origin]
    if not origins:
        killed, words = [end for end in ends if end.was_killed], failed[0].words
        if len(killed) == 1:  # the process that the others had lost: it sent no heartbeat, and did not end
            code = f"hang-{killed[0].phase.name.lower()}"
            return Failure(FaultClass.HANG, code, killed[0].rank, killed[0].step, words, progress)
        return Failure(FaultClass.PEERS, "peer-lost", None, progress, words, progress)
    origin = min(origins, key=lambda end: end.time if end.record is None else min(end.time, end.record.time_ns / 1e9))
    fault, code, device = _classify(origin, observations)
    severe = (each for each in lines if each.is_severe and each.rank == origin.rank)
    explanation = next((f"{each.code}: {each.text}" for each in severe), "")
    return Failure(fault, code, origin.rank, origin.step, origin.words, progress, device, explanation)


def _classify(origin: RankEnd, observations: Sequence[Observation]) -> tuple[FaultClass, str, int | None]:
    status = origin.outcome
    if status in REQUESTED:
        return FaultClass.PREEMPTION, f"exit-{status}", None
    cause = _cause(origin, observations)
    reason = Reason.OTHER if origin.record is None or status is None else origin.record.reason
    if reason in _REASONS and (cause is None or cause.fault is not FaultClass.GPU or reason in _NO_GPU):
        return *_REASONS[reason], None
    if cause is not None:
        return cause.fault, cause.code, cause.device
    if status == ExitCode.BAD_INPUT:
        return FaultClass.CONFIGURATION, f"exit-{status}", None
    return FaultClass.CRASH, "exception" if origin.record is not None and status else _name(origin), None


def _name(origin: RankEnd) -> str:
    if origin.status == 0 or (origin.is_wrapped and origin.status < 0):  # not that of the trainer
        return "no-exit-record"
    if origin.status > 0:
        return f"exit-{origin.status}"
    try:
        return f"signal-{signal.Signals(-origin.status).name}"
    except ValueError:
        return f"signal-{-origin.status}"


def _cause(origin: RankEnd, observations: Sequence[Observation]) -> Observation | None:
    """Return the observed fault that explains the end; those of hardware before those of software."""
    severe = [each for each in observations if each.is_severe and each.rank in (None, origin.rank)]
    causes = [FaultClass.GPU]
    # The out-of-memory killer sends SIGKILL. A shell returns 128 more, and a pipe the status of its last command.
    is_killed = origin.status in (-signal.SIGKILL, 128 + signal.SIGKILL)
    if is_killed or (origin.is_wrapped and not origin.status):
        causes.append(FaultClass.HOST_MEMORY)
    if origin.status >= 0 or origin.status == -signal.SIGBUS:  # when its disk is full, a trainer ends by itself, unless
        causes.append(FaultClass.DISK)  # it writes to a mapped file
    causes += [FaultClass.NETWORK, FaultClass.NON_FINITE, FaultClass.SPIKE]
    return next((each for fault in causes for each in severe if each.fault is fault), None)
