"""The supervisor: starts the trainer's processes, watches them, and acts on what ends or stops them."""

import random
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from zaya_jax.aegis import evidence
from zaya_jax.aegis.decision import decide
from zaya_jax.aegis.events import EventLog
from zaya_jax.aegis.exit_codes import SupervisorExit
from zaya_jax.aegis.failure import Failure, RankEnd, find_failure
from zaya_jax.aegis.hang import find_suspects
from zaya_jax.aegis.observation import FaultClass, Observation, Severity
from zaya_jax.aegis.output import Output
from zaya_jax.aegis.policy import Policy
from zaya_jax.aegis.processes import Gang, Rank, adopt_orphans, kill_strays
from zaya_jax.aegis.state import describe_ranks, write_state, write_verdict
from zaya_jax.aegis.timeouts import Silence, Timeouts
from zaya_jax.errors import ExitCode
from zaya_jax.run.digests import digest
from zaya_jax.run.progress_record import Phase

_TICK = 0.05  # seconds between two looks at the progress records; ends are noticed at once
_STATE_EVERY = 1.0  # seconds
_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Job(NamedTuple):
    """What a supervisor runs.

    Attributes:
      command: of the trainer, without a shell.
      processes: number of them on this node; more than one get `--coordinator`, `--processes` and `--process`.
      folder: of this supervisor; it exists.
      node: name of this machine.
      environment: of the processes.
    """

    command: Sequence[str]
    processes: int
    folder: Path
    node: str
    environment: Mapping[str, str]


class _Detected(NamedTuple):
    event: int
    time: float
    attempt: int


class Supervisor:
    """Keeps a job alive; `run` returns when the job is done, or when the supervisor gives up."""

    def __init__(self, job: Job, policy: Policy) -> None:
        """Supervise `job` by `policy`."""
        self._job, self._policy = job, policy
        self._log = EventLog(job.folder, job.node)
        self._timeouts = Timeouts(policy.timeouts, job.folder, digest("\0".join(job.command).encode()))
        self._outputs = Output(1), Output(2)
        self._signals: list[int] = []  # that asked to stop
        self._stop_at: float | None = None  # when to kill what has not stopped
        self._failures: list[tuple[float, Failure]] = []
        self._best_step = -1
        self._wrote_state = 0.0
        self._detected: _Detected | None = None  # the failure that is not yet recovered from
        self._observations: list[Observation] = []  # of this attempt

    def run(self) -> SupervisorExit:
        """Run the job to its end; the signals that ask it to stop are handled meanwhile."""
        adopt_orphans()
        before = {number: signal.signal(number, self._note_signal) for number in _STOPS}
        try:
            code, why = self._supervise()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            self._timeouts.save()
        severity = Severity.INFO if code in (SupervisorExit.DONE, SupervisorExit.PREEMPTED) else Severity.FATAL
        self._log.write("act", f"exit-{code.name.lower()}", severity=severity, text=why, exit_code=int(code))
        write_verdict(self._job.folder, code, why, self._log.attempt, self._best_step)
        write_state(self._job.folder, attempt=self._log.attempt, state="ended", exit_code=int(code), why=why, ranks=[])
        self._say(f"{why} Exit code {int(code)}.")
        for output in self._outputs:
            output.flush(1.0)
        self._log.close()
        return code

    def _supervise(self) -> tuple[SupervisorExit, str]:
        while True:
            failure = self._attempt()
            if self._signals:
                name = signal.Signals(self._signals[0]).name
                code = SupervisorExit.INTERRUPTED if name == "SIGINT" else SupervisorExit.PREEMPTED
                return code, f"Stopped by {name} after step {max(self._best_step, 0)}."
            if failure is None:
                return SupervisorExit.DONE, f"The command finished in attempt {self._log.attempt}."
            self._failures.append((time.monotonic(), failure))
            can_act = failure.fault not in self._policy.log_only
            decision = decide(self._failures, self._policy, jitter=random.random(), can_act=can_act)
            action = "restart" if decision.exit_code is None else f"exit-{decision.exit_code.name.lower()}"
            wanted = self._policy.rules.of(failure.fault)
            self._log.write(
                "decide", decision.rule, cause=self._cause, text=decision.why,
                fault=failure.fault, rank=failure.rank, step=failure.step, action=action,
                log_only=wanted if not can_act and wanted != "restart" else None,
            )  # fmt: skip
            if decision.exit_code is not None:
                return decision.exit_code, decision.why
            wait = f" in {decision.delay:.0f} s" if decision.delay >= 1 else ""
            self._say(f"{decision.why.removesuffix('.')}{wait}: {failure.words or 'no last words'}")
            self._sleep(decision.delay)
            if self._signals:
                return SupervisorExit.PREEMPTED, "Stopped while waiting to restart."

    def _attempt(self) -> Failure | None:
        """Run the processes once; return why they failed, or None if all finished."""
        job, policy = self._job, self._policy
        self._log.attempt += 1
        self._observations, self._stop_at = [], None
        gang = Gang(job.command, job.processes, job.environment, self._outputs)
        self._log.write("start", "attempt", text=" ".join(job.command))
        silences = {rank.index: Silence(4 * _TICK) for rank in gang.ranks}
        kill_at: float | None = None  # when to kill the processes that outlive a failed one
        hang: Failure | None = None
        try:
            while gang.running:
                self._pump(gang, _TICK)
                now = time.monotonic()
                self._look(gang, now)
                ended = [rank.end for rank in gang.ranks if rank.end is not None and rank.end.status != 0]
                if self._signals:
                    if self._stop_at is None:
                        self._ask_to_stop(gang, now)
                    elif now > self._stop_at or len(self._signals) > 1:
                        self._kill(gang, "The processes did not stop in time.")
                elif ended and kill_at is None:
                    self._detect_end(ended[0], now)
                    is_stopping = ended[0].status in (ExitCode.INTERRUPTED, ExitCode.TERMINATED)
                    kill_at = now + (policy.grace_seconds if is_stopping else policy.settle_seconds)
                elif kill_at is not None:
                    if now > kill_at:
                        self._kill(gang, "The other processes did not end by themselves.")
                elif (hang := self._find_hang(gang, silences)) is not None:
                    self._kill(gang, hang.words)
        finally:
            gang.close()
            kill_strays(())
        ends = [rank.end for rank in gang.ranks if rank.end is not None]
        failure = hang or find_failure(ends, self._observations)
        if failure is not None and not self._failed_now:
            self._detect_end(next(end for end in ends if end.status != 0), time.monotonic())
        self._note_attempt(gang, ends, failure)
        return failure

    @property
    def _cause(self) -> int | None:
        """The event of the failure that is not yet recovered from."""
        return None if self._detected is None else self._detected.event

    @property
    def _failed_now(self) -> bool:
        """Whether a failure of this attempt was detected."""
        return self._detected is not None and self._detected.attempt == self._log.attempt

    def _pump(self, gang: Gang, seconds: float) -> bool:
        """Pass on output, and note processes that ended; return whether anything was written."""
        _, lines = gang.wait(seconds)
        for output in self._outputs:
            output.flush()
        return bool(lines)

    def _look(self, gang: Gang, now: float) -> None:
        """Read the progress records: learn timeouts, notice recovery, and write the state."""
        for rank in gang.ranks:
            progress = rank.progress
            if progress is None or progress.first_step < 0:
                continue
            self._timeouts.learn(progress)
            self._best_step = max(self._best_step, progress.step)
            detected, trains = self._detected, rank.end is None and progress.step > progress.first_step
            if detected is not None and detected.attempt < self._log.attempt and trains:
                self._log.write("recover", "first-step", cause=detected.event, step=progress.step,
                                seconds={"recover": now - detected.time})  # fmt: skip
                self._detected = None
        if now - self._wrote_state >= _STATE_EVERY:
            self._wrote_state = now
            write_state(self._job.folder, attempt=self._log.attempt, state="running", ranks=describe_ranks(gang.ranks))

    def _detect_end(self, end: RankEnd, now: float) -> None:
        """Write that a process ended with an error; `find_failure` decides later which was the first."""
        words = "" if end.words is None else end.words.sentence
        event = self._log.write("detect", f"exit-{end.status}", severity=Severity.ERROR, text=words,
                                fault=FaultClass.CRASH, rank=end.rank, step=end.step,
                                phase=end.phase.name.lower())  # fmt: skip
        self._detected = _Detected(event, now, self._log.attempt)

    def _find_hang(self, gang: Gang, silences: Mapping[int, Silence]) -> Failure | None:
        """Return the failure if a process has been silent for longer than the timeout of its phase."""
        progress = {rank.index: rank.progress for rank in gang.running}
        late = []
        for index, each in progress.items():
            phase = Phase.START if each is None else each.phase
            seconds = silences[index].look(-1 if each is None else each.writes)
            if seconds > self._timeouts.limit(phase):
                late.append((index, phase, seconds))
        if not late:
            return None
        stopped = [rank.index for rank in gang.running if is_stopped(rank)]
        suspects = find_suspects(progress, stopped)
        index, phase, seconds = late[0]
        who = "all processes alike" if len(suspects) == len(progress) > 1 else f"process {suspects[0]}"
        words = (f"No progress for {seconds:.1f} s in phase {phase.name.lower()}, more than its timeout; the cause "
                 f"seems to be {who}{' (stopped by a signal)' if suspects[0] in stopped else ''}.")  # fmt: skip
        rank = suspects[0] if len(suspects) == 1 else None
        chosen = progress[suspects[0]]
        step = -1 if chosen is None or chosen.first_step < 0 else chosen.step
        event = self._log.write("detect", "hang", severity=Severity.ERROR, text=words, fault=FaultClass.HANG, rank=rank,
                                step=step, phase=phase.name.lower(), seconds={"detect": seconds})  # fmt: skip
        self._detected = _Detected(event, time.monotonic(), self._log.attempt)
        return Failure(FaultClass.HANG, f"hang-{phase.name.lower()}", rank, step, words, self._best_step)

    def _ask_to_stop(self, gang: Gang, now: float) -> None:
        """Pass on the request to stop, so that the trainer saves."""
        number = self._signals[0]
        self._stop_at = now + self._policy.grace_seconds
        event = self._log.write("detect", signal.Signals(number).name, fault=FaultClass.PREEMPTION)
        self._log.write("act", "ask-to-stop", cause=event, seconds={"grace": self._policy.grace_seconds})
        for rank in gang.running:
            rank.send(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)

    def _kill(self, gang: Gang, why: str) -> None:
        """Collect evidence, then kill all processes."""
        began = time.monotonic()
        files = evidence.collect(self._job.folder, self._log.attempt, gang, lambda seconds: self._pump(gang, seconds),
                                 self._policy.evidence_seconds)  # fmt: skip
        gang.kill()
        self._log.write("act", "kill", severity=Severity.WARNING, cause=self._cause, text=why,
                        files=files, seconds={"act": time.monotonic() - began})  # fmt: skip

    def _note_attempt(self, gang: Gang, ends: Sequence[RankEnd], failure: Failure | None) -> None:
        """Write the end of an attempt, with the seconds that its first process spent in each phase."""
        progress = gang.final_progress
        times = None if progress is None else {
            phase.name.lower(): seconds for phase, seconds in zip(Phase, progress.seconds, strict=True) if seconds
        }  # fmt: skip
        trained = progress is not None and progress.first_step >= 0
        self._log.write(
            "end", "finished" if failure is None else failure.code,
            severity=Severity.INFO if failure is None else Severity.ERROR, times=times,
            cause=None if failure is None else self._cause,
            first_step=progress.first_step if progress is not None and trained else None,
            last_step=progress.step if progress is not None and trained else None,
            exit_statuses=[end.status for end in sorted(ends, key=lambda end: end.rank)],
            **({} if failure is None else {"fault": failure.fault, "rank": failure.rank, "text": failure.words}),
        )  # fmt: skip

    def _sleep(self, seconds: float) -> None:
        """Wait, but not longer than until a signal asks to stop."""
        deadline = time.monotonic() + seconds
        while not self._signals and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, _TICK))

    def _say(self, sentence: str) -> None:
        self._outputs[1].say(sentence)

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)


def is_stopped(rank: Rank) -> bool:
    """Return whether the kernel shows the trainer as stopped, by SIGSTOP or a debugger."""
    progress = rank.progress
    pid = rank.process.pid if progress is None else progress.pid
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] in ("T", "t")
