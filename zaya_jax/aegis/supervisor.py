"""The supervisor: runs a training command, attempt after attempt, until it is done or must be given up."""

import dataclasses
import errno
import functools
import os
import random
import signal
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import wait as wait_for
from pathlib import Path
from typing import TypeVar

from zaya_jax.aegis.attempt import Attempt
from zaya_jax.aegis.decision import Decision, decide, final_code, requested_code
from zaya_jax.aegis.exit_codes import SupervisorExit
from zaya_jax.aegis.failure import MORE_NODES, Failure, FaultClass, Severity
from zaya_jax.aegis.faults import MARKS, read_marks
from zaya_jax.aegis.job_state import JobState
from zaya_jax.aegis.member import Member
from zaya_jax.aegis.monitor import Monitor
from zaya_jax.aegis.policy import Policy
from zaya_jax.aegis.processes import adopt_orphans
from zaya_jax.aegis.roster import State
from zaya_jax.aegis.spare import Spare
from zaya_jax.aegis.state import write_state, write_verdict
from zaya_jax.aegis.timeouts import Timeouts
from zaya_jax.aegis.training_command import TrainingCommand, plan_rollback, roll_back
from zaya_jax.aegis.training_watch import level_changes
from zaya_jax.errors import InputError
from zaya_jax.run.digests import digest
from zaya_jax.run.listening import reserved_port

_TICK = 0.05  # seconds
_LAST_NEWS = 10.0  # seconds that commands which tell of the end may take
_LAST_FILES = 5.0  # seconds that writing the last files may take
_T = TypeVar("_T")
_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Supervisor:
    """Keeps a job alive; `run` returns when the job is done, or when the supervisor gives up."""

    def __init__(
        self,
        command: TrainingCommand,
        policy: Policy,
        folder: Path,
        node: str,
        environment: Mapping[str, str],
        join: Callable[[int], Member] | None = None,
    ) -> None:
        """Prepare to run `command` in `environment` on this `node`; the `folder` of the supervisor exists.

        `join` joins a job of several nodes, of whose attempts it is given the last that this node knows.
        """
        self._join = join
        self._command, self._policy, self._environment = command, policy, environment
        timeouts = Timeouts(policy.timeouts, folder, digest("\0".join(command.argv).encode(errors="surrogateescape")))
        self._job = JobState(folder, node, policy, timeouts)
        self._monitor = Monitor(policy, command.run_dir, self._job.files, level_changes(command.config))
        self._failures: list[tuple[float, Failure]] = []
        self._faults_made = 0  # by a drill
        self._spare = Spare(self._job, environment)

    def run(self) -> SupervisorExit:
        """Run the job to its end; the signals that ask it to stop are handled meanwhile."""
        adopt_orphans()
        self._job.member = None if self._join is None else self._join(self._job.log.attempt)
        handled = [number for number in _STOPS if signal.getsignal(number) is not signal.SIG_IGN]  # as under nohup
        before = {number: signal.signal(number, self._job.note_signal) for number in handled}
        try:
            try:
                code, reason = self._supervise()
            except InputError as error:
                code, reason = SupervisorExit.CONFIGURATION, str(error)
            except Exception as error:
                traceback.print_exc()
                code, reason = SupervisorExit.SOFTWARE, f"The supervisor failed: {type(error).__name__}: {error}."
            self._end(code, reason)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        return code

    def _end(self, code: SupervisorExit, reason: str) -> None:
        """Write how it ended, everywhere; only to the output if the run folder belongs to others now."""
        job, submit = self._job, self._job.files.submit
        self._spare.end()
        self._monitor.close()
        severity = Severity.INFO if code in (SupervisorExit.DONE, SupervisorExit.PREEMPTED) else Severity.FATAL
        job.log.write("act", f"exit-{code.name.lower()}", severity=severity, text=reason, exit_code=int(code))
        folder, attempt, step = job.folder, job.log.attempt, job.best_step
        submit(lambda: write_verdict(folder, code, reason, attempt, step))
        submit(lambda: write_state(folder, attempt=attempt, state="ended", exit_code=int(code), why=reason, ranks=[]))
        submit(job.timeouts.save)
        job.outputs[1].say(f"{reason} Exit code {int(code)}.")
        if job.member is not None:
            job.outputs[1].flush(1.0)
            job.member.leave(code, reason)
        for output in job.outputs:
            if output.dropped:
                job.outputs[1].say(f"{output.dropped:,} bytes of output were dropped, since nobody read them.")
            output.flush(1.0)
        job.notifier.close(_LAST_NEWS)
        if not job.log.close(_LAST_FILES) and code is not SupervisorExit.SUPERSEDED:
            job.outputs[1].say("The run folder does not answer or is full, so it may lack events or the verdict.")
            job.outputs[1].flush(1.0)
            os._exit(code)  # closing its files would wait, too

    def _supervise(self) -> tuple[SupervisorExit, str]:
        job, member = self._job, self._job.member
        while True:
            self._monitor.start_attempt()
            if member is not None and not self._take_rank(member):
                return self._ended(member) or (requested_code(job.signals), self._stopped("while waiting for a rank"))
            with reserved_port() as address:  # another for each attempt, since any user of this machine can take one
                failure, note = self._attempt(address)
            self._note_faults_made()
            code = final_code(failure, job.signals)
            if failure is None and member is not None:  # the job has finished once all nodes have
                member.report(State.FINISHED)
                continue
            if failure is None:
                return SupervisorExit.DONE, f"The command finished in attempt {job.log.attempt}. {note}".strip()
            if code is SupervisorExit.SUPERSEDED:
                return code, failure.words
            if member is not None and (ended := self._ended(member)) is not None:
                return ended
            if code is not None:
                return code, self._stopped(f"after step {max(job.best_step, 0)}")
            if member is not None:
                member.report(State.ENDED, text=failure.words or f"{failure.code}.", event=job.cause)
                if failure.code == MORE_NODES:  # which is no fault
                    continue
            decision = self._decide(failure)
            if decision.exit_code is not None:
                return decision.exit_code, decision.reason
            wait = f" in {decision.delay:.0f} s" if decision.delay >= 1 else ""
            words = failure.words or failure.explanation or "no exit record"
            job.outputs[1].say(f"{decision.reason.removesuffix('.')}{wait}: {words}")
            self._sleep(decision.delay)
            if (code := final_code(failure, job.signals)) is not None:
                return code, self._stopped("while waiting to restart")

    def _take_rank(self, member: Member) -> bool:
        """Wait until this node has a rank in an attempt; False if the job has ended, or a signal asks to stop."""
        if (started := member.wait_for_start(self._idle)) is None:
            return False
        order, secret = started
        place = {"nodes": order.nodes, "node": order.rank or 0, "secret": secret}
        self._command = dataclasses.replace(self._command, **place)
        self._job.log.attempt = order.attempt - 1
        return True

    def _idle(self) -> bool:
        """Look at the machine while no processes run; return whether to go on."""
        now = time.monotonic()
        for observation in self._monitor.poll([], now):
            self._job.log.write_observation(observation)
        self._job.keep_files(now)
        self._spare.keep(self._command)
        time.sleep(_TICK)
        return not self._job.signals

    def _ended(self, member: Member) -> tuple[SupervisorExit, str] | None:
        return None if member.ended is None else (SupervisorExit(member.ended[0]), member.ended[1])

    def _attempt(self, address: str) -> tuple[Failure | None, str]:
        """Run the processes once; return why they failed, and a note on those that finished."""
        try:
            trains = self._command.config is not None
            list_processes = functools.partial(self._command.processes, address)
            listed = self._read(list_processes) if trains else list_processes()  # which then reads nothing
            processes = [(argv, {**self._environment, **variables}) for argv, variables in listed]
            standby = self._spare.place(self._command, processes)
            attempt = Attempt(self._job, processes, self._monitor, self._command, standby)
        except TimeoutError as error:
            return Failure(FaultClass.DISK, "folder-silent", None, -1, str(error)), ""
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.EACCES, errno.ENOEXEC):
                raise InputError(f"The command cannot be started: {error}.") from error
            return Failure(FaultClass.CRASH, "not-started", None, -1), ""  # the machine may be short of something
        return attempt.run(), attempt.note

    def _note_faults_made(self) -> None:
        """Write the faults that a drill has made in this attempt, so that goodput leaves them out."""
        if marks := self._environment.get(MARKS):
            made = read_marks(Path(marks))
            for mark in made[self._faults_made :]:
                self._job.log.write("inject", mark["fault"], made_at=mark["monotonic"])
            self._faults_made = len(made)

    def _stopped(self, when: str) -> str:
        return f"Stopped by {signal.Signals(self._job.signals[0]).name} {when}."

    def _decide(self, failure: Failure) -> Decision:
        """Decide by the policy, change the command if it wants that, and write both."""
        self._failures.append((time.monotonic(), failure))
        can_act = failure.fault not in self._policy.log_only
        decision = decide(self._failures, self._policy, jitter=random.random(), can_act=can_act)
        if decision.exit_code is None and decision.action == "fewer_devices":
            decision = self._use_fewer_devices(failure, decision)
        elif decision.exit_code is None and decision.action == "roll_back":
            decision = self._roll_back(failure, decision)
        ruled, code = self._policy.rules.of(failure.fault), decision.exit_code
        details = {"cause": self._job.cause, "fault": failure.fault, "rank": failure.rank, "step": failure.step}
        details["action"] = decision.action if code is None else f"exit-{code.name.lower()}"
        details["log_only"] = ruled if not can_act and ruled != "restart" else None
        self._job.log.write("decide", decision.rule, text=decision.reason, **details)
        return decision

    def _use_fewer_devices(self, failure: Failure, decision: Decision) -> Decision:
        lost = failure.device
        if lost is None and failure.rank is not None:
            lost = self._command.devices[failure.rank]
        fewer = self._command.with_fewer_devices(lost)
        if fewer is None:
            reason = "No smaller number of devices divides the batches, so another node is needed."
            return decision.adding(reason, SupervisorExit.RETRY_ELSEWHERE)
        self._command = fewer
        return decision.adding(f"Training continues on the devices {', '.join(map(str, fewer.devices))}.")

    def _roll_back(self, failure: Failure, decision: Decision) -> Decision:
        reason = "No checkpoint is older than the bad steps."
        try:
            plan = self._read(lambda: plan_rollback(self._command, failure))
            if plan is not None:
                self._command = roll_back(self._command, plan, lambda: bool(self._job.signals))
                rows = f"the rows {plan.first} to {plan.end - 1}"
                return decision.adding(f"Resuming from step {plan.step} without {rows}.")
        except (InputError, OSError) as error:
            reason = str(error)
        return decision.adding(reason, SupervisorExit.DO_NOT_REQUEUE)

    def _read(self, job: Callable[[], _T]) -> _T:
        """Return what `job` reads in the run folder.

        Raises `TimeoutError` if that takes longer than a process may take to open it, or a signal asks to stop.
        """
        result, deadline = self._job.files.submit(job), time.monotonic() + self._policy.timeouts.open
        while not wait_for([result], _TICK).done:
            if self._job.signals or time.monotonic() > deadline:
                raise TimeoutError(f"The file system of {self._command.run_dir} does not answer.")
            for observation in self._monitor.poll_folder():
                self._job.log.write_observation(observation)
        return result.result()

    def _sleep(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self._job.must_end and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, _TICK))
