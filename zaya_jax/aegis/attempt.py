"""One attempt: the processes from their start until all have ended, and why they failed if they did."""

import dataclasses
import math
import signal
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zaya_jax.aegis.failure import (
    MORE_NODES,
    SUPERSEDED,
    UNKILLABLE,
    Failure,
    FaultClass,
    Observation,
    RankEnd,
    Severity,
    find_failure,
)
from zaya_jax.aegis.hang import HangWatch, find_hang
from zaya_jax.aegis.job_state import JobState
from zaya_jax.aegis.monitor import Monitor
from zaya_jax.aegis.processes import KILL_SECONDS, Process, ProcessGroup, describe_process, kill_orphans
from zaya_jax.aegis.roster import Order
from zaya_jax.aegis.signatures import observe_line
from zaya_jax.aegis.state import describe_rank
from zaya_jax.aegis.supervision_report import SAME_FAULT
from zaya_jax.aegis.training_command import TrainingCommand
from zaya_jax.errors import REQUESTED, ExitCode
from zaya_jax.run.files import write_atomically
from zaya_jax.run.progress_record import Phase
from zaya_jax.run.writing import make_folder, remove

_TICK = 0.05  # seconds between two looks at the progress records; ends are noticed at once
_MOST_ANSWER = 10.0  # seconds that the run folder may take to answer
_MOST_OBSERVATIONS = 1000  # per attempt
EVIDENCE = "evidence"
_KEPT = 20  # folders of evidence
_QUIET = 0.3  # seconds without new output after which the stacks are complete
_MINUTE, _MOST_PER_MINUTE = 60.0, 10  # observations of one code that are written
# Faults that may end processes that still run.
_ACTED_ON = (FaultClass.GPU, FaultClass.NETWORK, FaultClass.NON_FINITE, FaultClass.SPIKE)


class Attempt:
    """Starts the processes; `run` returns when all have ended."""

    def __init__(
        self,
        job: JobState,
        processes: Sequence[Process],
        monitor: Monitor,
        command: TrainingCommand,
        standby: ProcessGroup | None = None,
    ) -> None:
        """Start the processes of `command`, unless they are on `standby`; raises `OSError` if one cannot be started."""
        self._job, self._policy, self._log, self._monitor = job, job.policy, job.log, monitor
        self._log.attempt += 1
        needs_records = command.names_trainer or job.best_step >= 0  # which has trained before
        self._group = standby or ProcessGroup(processes, job.outputs, expects_records=needs_records)
        self._log.write("start", "attempt", text=" ".join(processes[0][0]), processes=len(processes), **job.job_cause)
        self._hangs = HangWatch(job.timeouts, expects_records=command.config is not None)
        self._is_saved = command.is_saved
        self._observations = deque[tuple[float, Observation]](maxlen=_MOST_OBSERVATIONS)  # of the machine
        self._lines = deque[tuple[float, Observation]](maxlen=_MOST_OBSERVATIONS)  # of output
        self._planned: Failure | None = None  # why the supervisor ends the attempt
        self._kill_at: float | None = None  # when to kill what still runs
        self._lost_since = 0.0  # when a trainer ended before its command; else now
        self._is_asked = False  # whether a request to stop was passed on
        self._is_stopped = False  # whether the leader of the job has stopped this attempt
        self._saves = False  # whether it has asked the processes to save, so that another stop can follow
        self._best_step = -1  # greatest number of steps done in this attempt
        self._written: dict[str, tuple[float, int]] = {}  # code → start of a minute, observations written in it

    def run(self) -> Failure | None:
        """Run the processes to their end; return why they failed, or None if all finished."""
        group = self._group
        try:
            while group.running:
                self._pump(_TICK)
                self._step(time.monotonic())
        finally:
            group.close()
            leader = () if self._job.member is None else self._job.member.pids
            kill_orphans({*self._monitor.pids, *self._job.notifier.pids, *leader})
        for observation in self._monitor.poll_machine(time.monotonic()):  # the kernel says it before the process ends
            self._note(observation)
        ends = group.ends
        since = min((end.time for end in ends if end.outcome != 0), default=0.0) - SAME_FAULT
        observations = [each for seen, each in self._observations if seen >= since]
        lines = [each for seen, each in self._lines if seen >= since]
        failure = find_failure(ends, observations, lines, is_saved=self._has_saved(ends))
        is_superseded = failure is not None and failure.code == SUPERSEDED
        if failure is not None and self._planned is not None and not is_superseded:
            failure = self._planned
        if (stuck := group.stuck) and not is_superseded:
            words = f"Process {stuck[0]} did not end {KILL_SECONDS:g} s after SIGKILL."
            failure = Failure(FaultClass.HANG, UNKILLABLE, stuck[0], self._job.best_step, words)
        if failure is not None and failure.fault is not FaultClass.PREEMPTION and not self._job.has_failed:
            self._detect_end(next((end for end in ends if end.outcome != 0), ends[0]))
        self._write_end(ends, failure)
        return failure

    @property
    def note(self) -> str:
        """Sentences about processes that returned an error after they had finished; empty if there are none."""
        late = [end for end in self._group.ends if end.outcome == 0 != end.status]
        return " ".join(
            f"Process {end.rank} finished, and then its command ended with status {end.status}." for end in late
        )

    def _step(self, now: float) -> None:
        self._look(now)
        for observation in self._monitor.poll(self._group.ranks, now):
            self._observe(observation)
        failed = [end for end in self._group.ends if end.outcome != 0]
        signals, lost = self._job.signals, any(rank.has_lost_trainer for rank in self._group.running)
        self._lost_since = self._lost_since if lost else now  # a script may start another one
        stop = None if self._job.member is None else self._job.member.stop
        if stop is not None and (not self._is_stopped or (self._saves and not stop.saves and not stop.is_request)):
            self._obey(stop, now)
        elif signals and not self._is_asked:
            event = self._log.write("detect", signal.Signals(signals[0]).name, fault=FaultClass.PREEMPTION)
            self._ask_to_stop(signal.SIGINT if signals[0] == signal.SIGINT else signal.SIGTERM, event)
        elif len(signals) > 1:
            self._kill("Asked a second time to stop.")
        elif self._kill_at is not None:
            if now > self._kill_at:
                self._kill("The processes did not end by themselves.")
        elif failed:
            is_stopping = failed[0].outcome in REQUESTED
            if not is_stopping and not self._job.has_failed:
                self._detect_end(failed[0])
            self._kill_at = now + (self._policy.grace_seconds if is_stopping else self._policy.settle_seconds)
        elif lost and now > self._lost_since + self._policy.settle_seconds:
            for rank in self._group.running:  # before evidence is collected, since another trainer may start meanwhile
                rank.is_lost = rank.has_lost_trainer
            self._kill("A command did not end after its trainer had.")
        elif (hang := self._find_hang()) is not None:
            self._planned = hang
            self._kill(hang.words)

    def _pump(self, seconds: float) -> bool:
        """Pass on output, and note processes that ended; return whether anything was written."""
        lines = self._group.wait(seconds)
        records = (rank.exit_record for rank in self._group.ranks)
        if any(record is not None and record.status == ExitCode.SUPERSEDED for record in records):
            self._job.files.refuse()  # the run folder belongs to others
        for output in self._job.outputs:
            output.flush()
        for rank, line in lines:
            if (seen := observe_line("trainer", line.decode(errors="replace"), rank.index)) is not None:
                self._lines.append((time.monotonic(), seen))
                self._write_observation(dataclasses.replace(seen, severity=Severity.INFO), "line ")  # whatever it says
        return bool(lines)

    def _has_saved(self, ends: Sequence[RankEnd]) -> bool:
        """Return whether what the processes trained is saved; also true if the run folder does not answer."""
        if any(end.outcome != 0 for end in ends) or self._job.best_step < 0:
            return True
        try:
            return self._job.files.submit(self._is_saved).result(_MOST_ANSWER)
        except OSError:
            return True

    def _look(self, now: float) -> None:
        """Read the progress records: learn timeouts, notice recovery, and write the state."""
        job = self._job
        for rank in self._group.ranks:
            progress = rank.progress
            if progress is None or progress.first_step < 0:
                continue
            job.timeouts.learn(progress)
            self._best_step = max(self._best_step, progress.step)
            job.best_step = max(job.best_step, progress.step)
            if job.detected is not None and not job.has_failed and progress.step > progress.first_step:
                seconds = {"recover": now - job.detected.time}
                self._log.write("recover", "first-step", cause=job.cause, step=progress.step, seconds=seconds)
                job.detected = None
        job.keep_files(now, lambda: list(map(describe_rank, self._group.ranks)))

    def _observe(self, observation: Observation) -> None:
        """Write an observation of the machine or the training; end the attempt if the policy wants that.

        A full disk and a lack of memory end nothing: training survives them, or ends by itself.
        """
        event, fault = self._note(observation), observation.fault
        action = self._policy.rules.of(fault)
        is_acted_on = observation.is_severe and fault in _ACTED_ON and action != "report" and self._planned is None
        if event is None or not is_acted_on:
            return
        if fault in self._policy.log_only:
            self._log.write("decide", f"rules.{fault}", cause=event, log_only=action)
            return
        done, rank, text = self._best_step, observation.rank, observation.text
        step = done if observation.good_steps is None else observation.good_steps
        self._planned = Failure(fault, observation.code, rank, step, text, done, observation.device)
        self._job.detect(event)
        if action == "roll_back":
            self._kill(text)  # saving would keep what is to be undone
        else:
            self._ask_to_stop(signal.SIGTERM, event)

    def _note(self, observation: Observation) -> int | None:
        self._observations.append((time.monotonic(), observation))
        return self._write_observation(observation)

    def _write_observation(self, observation: Observation, source: str = "") -> int | None:
        """Write an event, and return its id; None if there were too many of its code and source."""
        now, code = time.monotonic(), source + observation.code
        since, count = self._written.get(code, (now, 0))
        if now - since >= _MINUTE:
            since, count = now, 0
        self._written[code] = since, count + 1
        return self._log.write_observation(observation) if count < _MOST_PER_MINUTE else None

    def _detect_end(self, end: RankEnd) -> None:
        """Write that a process ended with an error; `find_failure` decides later which was the first."""
        seen = Observation(f"exit-{end.status}", FaultClass.CRASH, Severity.ERROR, end.words, end.rank)
        self._job.detect(self._log.write_observation(seen, step=end.step, phase=end.phase.name.lower()))

    def _find_hang(self) -> Failure | None:
        samples = self._hangs.look([rank for rank in self._group.running if not rank.outlives_trainer])
        if (member := self._job.member) is not None:  # the leader sees the processes of all nodes
            member.note(samples=samples)
            return None
        hang = find_hang(samples)
        if hang is None:
            return None
        seen = Observation("hang", FaultClass.HANG, Severity.ERROR, hang.words, hang.rank)
        self._job.detect(self._log.write_observation(seen, **hang.details))
        return Failure(
            FaultClass.HANG, f"hang-{hang.details['phase']}", hang.rank, hang.step, hang.words, self._job.best_step
        )

    def _obey(self, stop: Order, now: float) -> None:
        """End the attempt, since the leader of the job wants that, or is lost."""
        self._is_stopped, self._saves, job = True, stop.saves, self._job
        if stop.is_request:
            if not job.signals:
                job.note_signal(signal.SIGTERM)
            return
        step, is_suspect = job.best_step, bool(stop.suspects)
        fault, code = (FaultClass.HANG, f"hang-{stop.hang}") if is_suspect else (FaultClass.PEERS, "job-stop")
        rank = stop.suspects[0] if len(stop.suspects) == 1 else None
        severity = Severity.ERROR if is_suspect else Severity.INFO if stop.saves else Severity.WARNING
        seen = Observation("hang" if is_suspect else code, fault, severity, stop.text, rank)
        event = self._log.write_observation(seen, **job.job_cause)
        if not job.has_failed:
            job.detect(event)
        if all(end.outcome == 0 for end in self._group.ends):  # else they know more than the leader
            code = "node-lost" if stop.is_lost else MORE_NODES if stop.saves else code
            self._planned = self._planned or Failure(fault, code, rank, step, seen.text, step)
        if stop.saves:
            self._ask_to_stop(signal.SIGTERM, event)
            return
        self._kill_at = min(self._kill_at or math.inf, now + self._policy.settle_seconds)
        if stop.hang:
            self._kill(stop.text)
        elif stop.is_lost:  # the others wait for it, and their stacks say no more
            self._group.kill()
            self._log.write("act", "kill", severity=Severity.WARNING, cause=event, text=stop.text)

    def _ask_to_stop(self, number: int, event: int) -> None:
        self._is_asked, grace = True, self._policy.grace_seconds
        self._kill_at = time.monotonic() + grace
        self._log.write("act", "ask-to-stop", cause=event, seconds={"grace": grace})
        for rank in self._group.running:
            rank.send(number)

    def _kill(self, reason: str) -> None:
        job, began = self._job, time.monotonic()
        files = self._collect_evidence(began + self._policy.evidence_seconds)
        self._group.kill()
        details = {"files": files, "seconds": {"act": time.monotonic() - began}}
        self._log.write("act", "kill", severity=Severity.WARNING, cause=job.cause, text=reason, **details)

    def _collect_evidence(self, deadline: float) -> list[str]:
        """Write the stacks of all threads, the last lines and the kernel's view; return the paths in the folder.

        None if they cannot be written in time: a disk that is full or silent must not keep a job from restarting.
        """
        group, folder, name = self._group, self._job.folder, f"attempt-{self._log.attempt}"
        kernel = {rank.index: describe_process(rank.process.pid) for rank in group.running}
        for rank in group.running:
            if rank.progress is not None and not rank.outlives_trainer:  # another command would end
                rank.send(signal.SIGUSR1)
        quiet = time.monotonic() + 2 * _QUIET
        while (now := time.monotonic()) < min(quiet, deadline):
            if self._pump(0.05):
                quiet = now + _QUIET
        content: dict[str, bytes] = {}
        for rank in group.ranks:
            texts = [b"\n".join(stream.last_lines) for stream in rank.streams] + [kernel.get(rank.index, "").encode()]
            named = zip(("stdout", "stderr", "kernel"), texts, strict=True)
            content |= {f"process-{rank.index}.{source}": text + b"\n" for source, text in named if text}
        written = self._job.files.submit(lambda: write_evidence(folder, name, content))
        try:
            return written.result(max(deadline - time.monotonic(), _QUIET))
        except OSError:
            return []

    def _write_end(self, ends: Sequence[RankEnd], failure: Failure | None) -> None:
        """Write the end of the attempt, with the seconds that its first process spent in each phase."""
        progress = self._group.final_progress
        details: dict[str, Any] = {"exit_statuses": [end.status for end in sorted(ends, key=lambda end: end.rank)]}
        if progress is not None:
            spent = zip(Phase, progress.seconds, strict=True)
            details["times"] = {phase.name.lower(): seconds for phase, seconds in spent if seconds}
            if progress.first_step >= 0:
                details |= {"first_step": progress.first_step, "last_step": progress.step}
        if failure is None:
            self._log.write("end", "finished", text=self.note, **details)
            return
        seen = Observation(failure.code, failure.fault, Severity.ERROR, failure.words, failure.rank)
        details |= {"cause": self._job.cause, "explanation": failure.explanation or None}
        self._log.write_observation(seen, "end", **details)


def write_evidence(folder: Path, name: str, content: Mapping[str, bytes]) -> list[str]:
    """Write files to the folder `name` of evidence, and remove all but the newest ones; return their relative paths."""
    target = folder / EVIDENCE / name
    make_folder(target)
    for file, text in content.items():
        write_atomically(target / file, text)
    numbers = (path.name.removeprefix("attempt-") for path in target.parent.iterdir())
    for number in sorted(int(number) for number in numbers if number.isdecimal())[:-_KEPT]:
        remove(target.parent / f"attempt-{number}", ignore_errors=True)
    return [f"{EVIDENCE}/{name}/{file}" for file in content]
