"""Observations of Aegis: a fault, or a sign of one, with its class, severity and evidence."""

import dataclasses
import enum

from zaya_jax.errors import printable


class FaultClass(enum.StrEnum):
    """The kind of a fault. Policies name their rules after it."""

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
    """The severity of an observation; ERROR and FATAL are synced to disk at once."""

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
