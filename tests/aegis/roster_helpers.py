"""A leader's roster with simulated supervisors that obey it, fail, are lost, and return."""

import dataclasses
from collections.abc import Sequence

from zaya_jax.aegis.hang import Sample
from zaya_jax.aegis.roster import Order, Report, Roster, State
from zaya_jax.run.progress_record import Phase

JOB = {"nodes": 3, "spares": 1, "processes": 2, "command": "c"}
PATIENCE, RETURN, GATHER = 100.0, 60.0, 10.0  # seconds


def goes_to(order: Order, report: Report) -> bool:
    return order.runs and order.rank is not None and order.attempt > report.attempt


def sample(process: int, writes: int, seconds: float = 9.0) -> Sample:
    """A process that has waited for `seconds` of the 5 that it may."""
    return Sample(process, writes, Phase.DEVICE_WAIT, 3, seconds, seconds, 5.0, is_stopped=False)


class Job:
    """A leader's roster and simulated supervisors."""

    def __init__(self, nodes: int, spares: int, smaller: Sequence[int] = ()) -> None:
        self.nodes, self.spares, self.smaller, self.now = nodes, spares, smaller, 0.0
        self.job = {**JOB, "nodes": nodes, "spares": spares, "smaller": list(smaller)}
        self.events: list[tuple[str, str, dict]] = []
        self.logged = 0  # attempt
        self.reports: dict[int, Report] = {}  # of supervisors that run, connected or not
        self.starts: list[dict[int, int]] = []  # rank → index, of each attempt
        self.roster = self.lead()

    def lead(self) -> Roster:
        return Roster(self.job, self.logged, PATIENCE, self.write)

    def write(self, kind: str, code: str, **details: object) -> int:
        self.events.append((kind, code, details))
        if code == "job-attempt":
            busy = [report for report in self.roster.members.values() if report.state in (State.RUNNING, State.ENDED)]
            assert not busy, "an attempt starts while processes of another may run"
        self.logged = details.get("attempt", self.logged)
        return len(self.events)

    def come(self, index: int) -> Order | None:
        report = self.reports.setdefault(index, Report(index, f"node-{index}", f"i{index}", self.job))
        rejection = self.roster.admit(report, self.now)
        self.roster.decide(self.now)
        return rejection

    def lose(self, index: int, why: str = "it is silent") -> None:
        self.roster.lose(index, why)
        self.roster.decide(self.now)

    def say(self, index: int, state: State, **changes: object) -> None:
        self.reports[index] = dataclasses.replace(self.reports[index], state=state, **changes)
        if index in self.roster.members:
            self.roster.observe(self.reports[index])
            self.roster.decide(self.now)

    def obey(self, index: int) -> None:
        """Do what the newest order says, as `Member` and the supervisor do."""
        order, report = self.roster.order_for(index), self.reports[index]
        if order.code is not None:  # another node does its work
            del self.reports[index]
            return
        goes_on = order.runs and (order.attempt, order.rank) == (report.attempt, report.rank)
        if report.state is State.RUNNING and not goes_on:
            self.say(index, State.ENDED)
        elif report.state is State.ENDED:
            self.say(index, State.READY)
        elif report.state is not State.RUNNING and goes_to(order, report):
            place = {"attempt": order.attempt, "rank": order.rank, "nodes": order.nodes}
            self.say(index, State.RUNNING, **place, samples=None)

    def hang(self, index: int) -> None:
        """All processes of the attempt wait for the second one of a node."""
        for each in list(self.roster.members):
            if self.reports[each].state is State.RUNNING:
                samples = [sample(0, 9), sample(1, 8 if each == index else 9)]
                self.say(each, State.RUNNING, samples=samples)
        self.now += 1.0
        self.roster.decide(self.now)

    def check(self) -> None:
        roster = self.roster
        assert len(set(roster.ranks.values())) == len(roster.ranks) <= self.nodes
        starts = [details for _, code, details in self.events if code == "job-attempt"]
        attempts = [details["attempt"] for details in starts]
        assert attempts == sorted(set(attempts)), "an attempt was started twice"
        running = [(each.attempt, each.rank) for index, each in self.reports.items()
                   if each.state is State.RUNNING and index in roster.members
                   and (roster.order.runs and roster.order_for(index).rank == each.rank
                        and each.attempt == roster.order.attempt)]  # fmt: skip
        assert len(running) == len(set(running)), "two nodes have one rank"
        if roster.order.runs:
            assert roster.order.nodes in (self.nodes, *self.smaller)
            assert max(roster.ranks.values(), default=0) < roster.order.nodes
            assert roster.ranks.get(0, 0) == 0, "process 0 is not on the leader's node"

    def settle(self) -> None:
        """Let time pass without faults until the job has ended."""
        for _ in range(400):
            self.now += 1.0
            for index in list(self.reports):
                if index not in self.roster.members and self.roster.order.code is None:
                    if (rejection := self.come(index)) is not None:
                        assert "it seemed to cause 2 hangs" in rejection.text
                        del self.reports[index]
                elif self.roster.order.code is None:
                    self.obey(index)
            if self.roster.order.runs and self.roster.order.code is None:
                for index, report in list(self.reports.items()):
                    if report.state is State.RUNNING and report.attempt == self.roster.order.attempt:
                        self.say(index, State.FINISHED)
            self.roster.decide(self.now)
            self.check()
            if self.roster.has_ended:
                return
        raise AssertionError(f"the job does not end: {self.roster.order}, {self.reports}")


def started(nodes: int = 3, spares: int = 1, smaller: Sequence[int] = ()) -> Job:
    """A job that trains on all but its spares."""
    job = Job(nodes, spares, smaller)
    for index in reversed(range(nodes + spares)):
        assert job.come(index) is None
    for index in range(nodes + spares):
        job.obey(index)
    assert job.roster.order.runs
    return job


def shrunk() -> Job:
    """A job that trains on two of three nodes, since one was lost and no spare was there."""
    job = started(3, 0, smaller=(2,))
    job.lose(1)
    for index in (0, 2, 0, 2):
        job.obey(index)
    job.roster.decide(job.now)
    job.roster.decide(job.now + RETURN)
    for index in (0, 2):
        job.obey(index)
    return job
