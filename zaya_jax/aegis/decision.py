"""Decide what to do about a failure: a pure function of the failures so far and the policy."""

import dataclasses
import signal
from collections.abc import Sequence
from typing import Self

from zaya_jax.aegis.exit_codes import SupervisorExit
from zaya_jax.aegis.failure import SUPERSEDED, UNKILLABLE, Failure, FaultClass
from zaya_jax.aegis.policy import Action, Policy

_HOUR = 3600.0  # seconds

_STOP_CODES = {
    FaultClass.PREEMPTION: SupervisorExit.PREEMPTED,
    FaultClass.CONFIGURATION: SupervisorExit.CONFIGURATION,
    FaultClass.CHECKPOINT: SupervisorExit.NO_CHECKPOINT,
}


@dataclasses.dataclass(frozen=True)
class Decision:
    """The answer to a failure."""

    rule: str  # name of the rule that decided
    action: Action  # of the policy
    exit_code: SupervisorExit | None  # of the supervisor, if it ends; None to restart
    reason: str  # a sentence
    delay: float = 0.0  # seconds to wait before the restart

    def adding(self, sentence: str, exit_code: SupervisorExit | None = None) -> Self:
        """Return the decision with another sentence, and the exit code if it makes the supervisor end."""
        return dataclasses.replace(self, reason=f"{self.reason} {sentence}", exit_code=exit_code)


def final_code(failure: Failure | None, signals: Sequence[int]) -> SupervisorExit | None:
    """Return how the supervisor ends after an attempt, which `signals` asked to stop; None if the policy decides."""
    if failure is None:
        return SupervisorExit.DONE
    if failure.code == SUPERSEDED:
        return SupervisorExit.SUPERSEDED
    return requested_code(signals) if signals else None


def requested_code(signals: Sequence[int]) -> SupervisorExit:
    """Return how a supervisor ends that `signals` asked to stop."""
    return SupervisorExit.INTERRUPTED if signals[0] == signal.SIGINT else SupervisorExit.PREEMPTED


def decide(
    failures: Sequence[tuple[float, Failure]], policy: Policy, *, jitter: float = 0.0, can_act: bool = True
) -> Decision:
    """Decide what to do about the last of the `failures`, each with its monotonic time.

    The run restarts unless a rule says otherwise; rules in order: the action of the class of fault, the same failure
    again, no progress, the budget of restarts. `jitter` is a random number in [0, 1); without `can_act`, the action of
    the rule is only logged.
    """
    now, failure = failures[-1]
    restart, rule = policy.restart, f"rules.{failure.fault}"
    place = "" if failure.rank is None else f" of process {failure.rank}"
    name = f"the {failure.fault.replace('_', ' ')} fault {failure.code}{place}"
    action = policy.rules.of(failure.fault)
    # What has been trained with is valid; perhaps its data or its folder is away.
    was_valid = failure.fault is FaultClass.CONFIGURATION and any(each.progress >= 0 for _, each in failures[:-1])
    if action == "stop" and not was_valid:
        code = _STOP_CODES.get(failure.fault, SupervisorExit.DO_NOT_REQUEUE)
        return Decision(rule, action, code, f"The policy stops the run on {name}.")
    elsewhere = SupervisorExit.RETRY_ELSEWHERE
    if action == "replace_node" and can_act:
        return Decision(rule, action, elsewhere, f"The policy asks for another node on {name}.")
    if failure.code == UNKILLABLE:
        reason = f"{failure.words} The kernel does not end it, so this node needs a restart."
        return Decision("unkillable", "replace_node", elsewhere, reason)
    alike = sum(each.same == failure.same for _, each in failures)
    may_repeat = was_valid or failure.fault in (FaultClass.HANG, FaultClass.PEERS, FaultClass.DISK)
    if failure.words and not may_repeat and alike >= restart.same_failure:
        moment = "before the first step" if failure.step < 0 else f"after step {failure.step}"
        reason = f"The same failure happened {alike} times {moment}, so it is deterministic: {failure.words}"
        return Decision("restart.same_failure", "stop", SupervisorExit.DO_NOT_REQUEUE, reason)
    stuck = _without_progress([each for _, each in failures])
    if stuck > restart.no_progress:
        # Other nodes do not come back: the job needs new ones.
        code = elsewhere if failure.fault is FaultClass.PEERS else SupervisorExit.DO_NOT_REQUEUE
        reason = f"{stuck} attempts in a row ended without a new step (restart.no_progress={restart.no_progress})."
        return Decision("restart.no_progress", "stop", code, reason)
    recent = sum(now - time < _HOUR for time, _ in failures[:-1])
    if recent >= restart.per_hour:
        reason = f"{recent} restarts within an hour are the limit (restart.per_hour)."
        return Decision("restart.per_hour", "stop", SupervisorExit.BUDGET_SPENT, reason)
    delay = restart.delays[min(stuck, len(restart.delays) - 1)] * (1 + restart.jitter * jitter)
    change: Action = action if can_act and action in ("fewer_devices", "roll_back") else "restart"
    return Decision(rule, change, None, f"Restarting after {name}.", delay)


def _without_progress(failures: Sequence[Failure]) -> int:
    """Count the last attempts of which none did a step that had not been done before."""
    count, best = 0, 0
    for failure in failures:
        count = 0 if failure.progress > best else count + 1
        best = max(best, failure.progress)
    return count
