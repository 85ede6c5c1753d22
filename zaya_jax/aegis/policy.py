"""The policy: what the supervisor does about each fault, and when it gives up. Written as YAML, see `docs/aegis.md`."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from zaya_jax.aegis.failure import FaultClass
from zaya_jax.config.bounds import NonNegative, Positive, check_bounds
from zaya_jax.config.checks import require
from zaya_jax.config.loader import load_as
from zaya_jax.run.progress_record import Phase

# restart: all processes, from the newest intact checkpoint. fewer_devices: the same without the device of the process
# that failed. roll_back: to a checkpoint before the bad steps, and on without their rows of data. replace_node: stop,
# and ask the scheduler for another node. stop: do not requeue. report: write an event, nothing else.
Action = Literal["restart", "fewer_devices", "roll_back", "replace_node", "stop", "report"]


@dataclass(frozen=True)
class TimeoutPolicy:
    """Seconds that a process may stay in a phase without a sign of progress.

    After `learn_after` steps it is `factor` times the longest stay so far, from `floor` to the value here.
    """

    start: Positive[float] = 600.0
    join: Positive[float] = 900.0
    open: Positive[float] = 3600.0
    restore: Positive[float] = 3600.0
    compile: Positive[float] = 3600.0
    data: Positive[float] = 1800.0
    dispatch: Positive[float] = 1800.0
    device_wait: Positive[float] = 1800.0
    evaluate: Positive[float] = 3600.0
    save: Positive[float] = 1800.0
    finish: Positive[float] = 3600.0
    end: Positive[float] = 240.0
    floor: Positive[float] = 240.0
    factor: Positive[float] = 5.0
    learn_after: Positive[int] = 5  # steps

    def of(self, phase: Phase) -> float:
        """Return the value of `phase`."""
        return getattr(self, phase.name.lower())


@dataclass(frozen=True)
class RestartPolicy:
    """When to restart, and when to give up."""

    per_hour: NonNegative[int] = 10  # restarts; then the supervisor ends with BUDGET_SPENT
    delays: tuple[float, ...] = (0.0, 5.0, 20.0, 60.0)  # seconds before the first, second, … restart without progress
    jitter: NonNegative[float] = 0.1  # random part of a delay, so that nodes do not restart at once
    same_failure: Positive[int] = 2  # equal failures at the same step that make it deterministic
    no_progress: Positive[int] = 3  # restarts in a row without a new step before the supervisor gives up


@dataclass(frozen=True)
class TrainingPolicy:
    """When the training itself looks wrong."""

    spike_window: Positive[int] = 128  # losses compared with
    spike_threshold: Positive[float] = 6.0  # robust standard deviations above their median
    spike_steps: Positive[int] = 10  # steps in a row with a high loss, or half of twice as many with one not finite
    straggler_steps: Positive[int] = 50  # steps of a window
    straggler_windows: Positive[int] = 2  # windows in a row in which a process is slow
    straggler_score: Positive[float] = 0.7  # time of a window without a process' delay, relative to the time it took


@dataclass(frozen=True)
class WatchPolicy:
    """The checks of the machine."""

    kernel_log: str | None = "/dev/kmsg"  # or a file with the kernel's messages; null to leave it out
    sysfs: str = "/sys"
    link_down_seconds: Positive[float] = 150.0  # a link may be down; more than the network retries
    gpu_seconds: Positive[float] = 30.0  # between two probes of the GPUs
    gpu_timeout: Positive[float] = 20.0  # seconds that a probe may take


@dataclass(frozen=True)
class RulePolicy:
    """The answer to each class of fault that ends or endangers the run."""

    hang: Action = "restart"
    crash: Action = "restart"
    network: Action = "restart"
    peers: Action = "restart"
    gpu: Action = "replace_node"
    non_finite: Action = "roll_back"
    spike: Action = "roll_back"
    straggler: Action = "report"
    host_memory: Action = "restart"
    device_memory: Action = "stop"
    checkpoint: Action = "stop"
    disk: Action = "restart"
    configuration: Action = "stop"

    def of(self, fault: FaultClass) -> Action:
        """Return the action of `fault`; a preemption always stops the run."""
        return "stop" if fault is FaultClass.PREEMPTION else getattr(self, fault.value)


@dataclass(frozen=True)
class NotifyPolicy:
    """Which command of the site to run for severe events; it gets the event as a line of JSON on its standard input."""

    command: tuple[str, ...] = ()  # its absolute path and arguments, run without a shell; empty for none
    severity: Literal["warning", "error", "fatal"] = "error"  # least severity of the events
    timeout_seconds: Positive[float] = 30.0  # after which the command is killed


@dataclass(frozen=True)
class Policy:
    """A policy."""

    timeouts: TimeoutPolicy = field(default_factory=TimeoutPolicy)
    restart: RestartPolicy = field(default_factory=RestartPolicy)
    rules: RulePolicy = field(default_factory=RulePolicy)
    training: TrainingPolicy = field(default_factory=TrainingPolicy)
    watch: WatchPolicy = field(default_factory=WatchPolicy)
    notify: NotifyPolicy = field(default_factory=NotifyPolicy)
    # Classes of faults whose action is only reported, while the run continues; processes that have ended are restarted.
    log_only: tuple[str, ...] = ("gpu", "network", "non_finite", "spike", "straggler")
    grace_seconds: NonNegative[float] = 300.0  # that a run which is asked to stop may take to save, before it is killed
    # Seconds that the other processes may take to end by themselves after one has failed.
    settle_seconds: NonNegative[float] = 2.0
    evidence_seconds: NonNegative[float] = 5.0  # that collecting evidence before a kill may take

    def check(self) -> None:
        """Raise `InputError` if a value is invalid."""
        check_bounds(self)
        delays, command = list(self.restart.delays), list(self.notify.command)
        allowed = "a list of at least one number, none negative"
        require(len(delays) > 0 and min(delays) >= 0, "restart.delays", delays, allowed)
        if command:
            program = Path(command[0])
            is_program = program.is_absolute() and program.is_file() and os.access(program, os.X_OK)
            allowed = "a list that starts with the absolute path of an executable file"
            require(is_program, "notify.command", command, allowed)
        names = list(vars(self.rules))
        for name in self.log_only:
            require(name in names, "log_only", name, f"a list of {', '.join(names)}")


def load_policy(path: str | Path | None) -> Policy:
    """Read and check a policy, None for the defaults; `InputError` if a key or value of the file is invalid."""
    policy = Policy() if path is None else load_as(Policy, path)
    policy.check()
    return policy
