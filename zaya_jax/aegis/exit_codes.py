"""The exit codes of the supervisor, which tell a scheduler what to do."""

import enum


class SupervisorExit(enum.IntEnum):
    """The exit status of `aegis run`."""

    DONE = 0  # the training finished
    SOFTWARE = 70  # the supervisor itself failed
    RETRY_ELSEWHERE = 75  # requeue on another node: this one is faulty
    CONFIGURATION = 78  # the command or the policy is invalid; requeuing does not help
    PREEMPTED = 85  # asked to stop; the newest checkpoint is kept: requeue
    DO_NOT_REQUEUE = 93  # the same failure again, or no progress: a person must look
    NO_CHECKPOINT = 94  # every checkpoint is damaged
    BUDGET_SPENT = 95  # too many restarts in an hour
    SUPERSEDED = 96  # another job has resumed this run and goes on with it
    INTERRUPTED = 130  # Ctrl-C


MEANINGS = {
    SupervisorExit.DONE: "finished",
    SupervisorExit.SOFTWARE: "the supervisor failed",
    SupervisorExit.RETRY_ELSEWHERE: "requeue on another node",
    SupervisorExit.CONFIGURATION: "invalid command or policy",
    SupervisorExit.PREEMPTED: "stopped on request: requeue",
    SupervisorExit.DO_NOT_REQUEUE: "do not requeue",
    SupervisorExit.NO_CHECKPOINT: "no intact checkpoint",
    SupervisorExit.BUDGET_SPENT: "too many restarts",
    SupervisorExit.SUPERSEDED: "another job has resumed the run: do not requeue",
    SupervisorExit.INTERRUPTED: "interrupted",
}
