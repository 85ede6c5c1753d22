"""The exit codes of the supervisor, which tell a scheduler what to do."""

import enum


class SupervisorExit(enum.IntEnum):
    """The exit status of `aegis run`."""

    meaning: str

    def __new__(cls, code: int, meaning: str) -> "SupervisorExit":
        """Make a member with a `meaning`, as reports show it."""
        member = int.__new__(cls, code)
        member._value_, member.meaning = code, meaning
        return member

    DONE = 0, "finished"
    SOFTWARE = 70, "the supervisor failed"
    RETRY_ELSEWHERE = 75, "requeue on another node"  # this one is faulty
    CONFIGURATION = 78, "invalid command or policy"
    PREEMPTED = 85, "stopped on request: requeue"  # the newest checkpoint is kept
    DO_NOT_REQUEUE = 93, "do not requeue"  # the same failure again, or no progress: a person must look
    NO_CHECKPOINT = 94, "no intact checkpoint"  # every one is damaged
    BUDGET_SPENT = 95, "too many restarts"  # in an hour
    SUPERSEDED = 96, "another job has resumed the run: do not requeue"
    INTERRUPTED = 130, "interrupted"  # Ctrl-C
