"""The nodes of a job and their ranks, as the leader sees them: a state machine without sockets, files or clocks.

The leader and each member send each other their state over and over, not commands, so no message has to arrive: a
member reports its `Report`, and does what the newest `Order` for it says. A leader that was restarted learns from the
reports which attempt runs. Ranks belong to one attempt; a node that comes back after it was lost is a spare.
"""

import dataclasses
import enum
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

from zaya_jax.aegis.exit_codes import SupervisorExit
from zaya_jax.aegis.failure import Severity
from zaya_jax.aegis.hang import Sample, find_hang
from zaya_jax.errors import printable
from zaya_jax.run.progress_record import Phase

_GATHER = 10.0  # seconds to wait for the rest once enough nodes are ready, so that the first nodes get the ranks
_RETURN = 60.0  # seconds to wait for a node once no spare is left, such as a pod that Kubernetes replaces
_LOOK = 0.5  # seconds between two looks at the progress of all processes
_HANGS = 2  # hangs that a node seems to cause before a spare replaces it
_REJOIN = 4.0  # seconds in which the members return to a leader that was restarted


class State(enum.StrEnum):
    """What a member does."""

    READY = "ready"  # it waits for a rank
    RUNNING = "running"  # its processes run
    ENDED = "ended"  # they have failed, and it is not ready yet
    FINISHED = "finished"  # they have finished
    LEFT = "left"  # its supervisor ends


@dataclasses.dataclass(frozen=True)
class Report:
    """What a member tells the leader."""

    index: int  # of the node, by the launcher
    name: str  # of the node, in messages
    instance: str  # random, of this supervisor
    job: Mapping[str, Any]  # what all supervisors of a job must have in common
    state: State = State.READY
    attempt: int = 0  # the last one that it has run, or knows of
    rank: int | None = None  # in that attempt
    nodes: int = 0  # of that attempt
    text: str = ""  # why the attempt failed, or the supervisor ends
    code: int = 0  # exit code with which it ends
    event: int | None = None  # the event of the failure in the node's own log
    address: str = ""  # where it serves copies of checkpoints, see `Copies`; empty if it serves none
    held: int | None = None  # step of the checkpoint of which it holds every part, verified
    unfit: str = ""  # why it cannot train, such as a preflight that failed
    has_token: bool = False  # `Order.has_token`, for a leader that was restarted
    samples: Sequence[Sample] | None = None  # of its processes that keep a progress record; None before they run

    @classmethod
    def parse(cls, message: Mapping[str, Any]) -> Self:
        """Make a report from JSON; `TypeError`, `ValueError` or `KeyError` if it is of another version."""
        samples = message["samples"]
        if samples is not None:
            samples = [Sample._make(row)._replace(phase=Phase(row[2])) for row in samples]
        return cls(**{**message, "state": State(message["state"]), "samples": samples})


@dataclasses.dataclass(frozen=True)
class Order:
    """What the leader wants of a member."""

    attempt: int = 0  # the newest
    rank: int | None = None  # of this node in it; None for a spare
    nodes: int = 0  # number of nodes with a rank in it
    runs: bool = False  # whether the attempt goes on
    saves: bool = False  # whether the processes are to save before they end, as more nodes are there
    nonce: str = ""  # makes the secret of the attempt
    is_lost: bool = False  # whether it was stopped since a node was lost: its processes wait in vain
    text: str = ""  # why it was stopped, or the job ended
    code: int | None = None  # exit code with which all supervisors end; None while the job goes on
    event: int | None = None  # the event that this follows from in the job's log
    peers: Sequence[str] = ()  # where to get copies, node 0 first: from it alone unless `copies`
    copies: bool = False  # whether to get copies of the newest checkpoint: a spare, or a node that replaces another
    hang: str = ""  # phase in which processes hang, if it was stopped for that
    suspects: Sequence[int] = ()  # the processes that seem to cause it; their numbers in the job
    has_token: bool = False  # whether a process of the job has taken a fencing token

    @property
    def is_request(self) -> bool:
        """True if the job was asked to stop, so that its processes may save."""
        return self.code in (SupervisorExit.PREEMPTED, SupervisorExit.INTERRUPTED)


# Writes an event to the log of the job, and returns its id.
WriteEvent = Callable[..., int]


class Roster:
    """Decides which node has which rank, when an attempt starts and stops, and when the job ends."""

    def __init__(self, job: Mapping[str, Any], attempt: int, patience: float, write: WriteEvent) -> None:
        """Wait for the `nodes` and `spares` of a `job`; the last of earlier attempts was `attempt`.

        `patience` is how long to wait for nodes that are missing before the first attempt, in seconds; then one of the
        `smaller` numbers of the job will do.
        """
        self._job, self._patience, self._write = job, patience, write
        self._nodes, self._spares = job["nodes"], job["spares"]
        self._sizes = sorted({self._nodes, *job["smaller"]}, reverse=True)  # numbers of nodes that may train
        self.members: dict[int, Report] = {}
        self.lost: dict[int, str] = {}  # index → sentence
        self.ranks: dict[int, int] = {}  # of the nodes in this attempt, or before it the last one; by index
        self.order = Order(attempt, nodes=self._nodes)  # for all, without a rank
        self._replacements: set[int] = set()  # nodes that have a rank in this attempt and had none before
        self._finished: set[int] = set()  # ranks
        self._incomplete_since: float | None = None  # while an attempt that this leader did not start lacks ranks
        self._waiting_since: float | None = None  # while nodes are missing
        self._gathering_since: float | None = None  # while enough are ready for the first attempt, or for more ranks
        self._looked = -_LOOK  # when the progress of the processes was compared last
        self._suspected = Counter[str]()  # instance → hangs that it seemed to cause
        self._replaced: dict[int, tuple[str, Order]] = {}  # index → instance, and the order to end
        self._has_ordered = False  # whether this leader has started or stopped an attempt
        self.has_token = False  # whether a process of the job has taken a fencing token

    @property
    def has_ended(self) -> bool:
        """True once all supervisors are to end."""
        return self.order.code is not None

    def order_for(self, index: int) -> Order:
        """Return what a member is to do."""
        if index in self._replaced:
            return self._replaced[index][1]
        rank = self.ranks.get(index)
        copies = index in self._replacements if rank is not None else self.order.runs
        numbers = sorted(self.members) if copies else [0] if 0 in self.members else []
        peers = [self.members[each].address for each in numbers if each != index and self.members[each].address]
        return dataclasses.replace(self.order, rank=rank, peers=peers, copies=copies, has_token=self.has_token)

    def admit(self, report: Report, now: float) -> Order | None:
        """Add a member of the job, or return the order with which it is rejected."""
        other = self.members.get(report.index)
        pairs = [(key, report.job.get(key), value) for key, value in self._job.items()]
        differing = [f"{key}={its!r} instead of {value!r}" for key, its, value in pairs if its != value]
        if self.has_ended:
            return self.order
        instance, order = self._replaced.get(report.index, ("", self.order))
        if report.instance == instance:
            return order
        if differing:
            why = f"it was started with {', '.join(differing)}. Start all supervisors of a job alike."
        elif not 0 <= report.index < self._nodes + self._spares:
            why = f"nodes are numbered from 0 to {self._nodes + self._spares - 1}."
        elif other is not None and other.instance != report.instance:
            why = f"{other.name} has joined as node {report.index}. Give each supervisor another --node."
        else:
            self._add(report, now)
            return None
        text = f"Node {report.index} ({report.name}) was rejected: {why}"
        self._write("detect", "node-rejected", severity=Severity.WARNING, text=text)
        return Order(text=text, code=SupervisorExit.CONFIGURATION)

    def _add(self, report: Report, now: float) -> None:
        self._replaced.pop(report.index, None)
        back, is_known = self.lost.pop(report.index, None), report.index in self.members
        self.members[report.index] = report
        if back or not is_known:  # else its connection broke
            self._write("act", "node-joined", text=f"{report.name} {'returned' if back else 'joined'}.")
        self._adopt(report, now)
        self.observe(report)

    def _adopt(self, report: Report, now: float) -> None:
        """Take over the attempt that an earlier leader of this job has started, or the number of nodes of its last."""
        if self._has_ordered or not report.nodes or report.attempt < self.order.attempt:
            return
        if report.rank is None or report.state not in (State.RUNNING, State.FINISHED, State.LEFT):
            if not self.order.runs:
                self.order = Order(report.attempt, nodes=report.nodes)
            return
        if report.attempt > self.order.attempt or not self.order.runs:
            self.ranks, self._finished, self._incomplete_since = {}, set(), now
            self.order = Order(report.attempt, nodes=report.nodes, runs=True)
        if report.rank is not None and report.rank not in self.ranks.values():
            self.ranks[report.index] = report.rank

    def observe(self, report: Report) -> None:
        """Note what a member reports; `decide` acts on it."""
        index = report.index
        before, self.members[index] = self.members.get(index), report
        self.has_token = self.has_token or report.has_token
        if report.unfit and (before is None or before.unfit != report.unfit):
            text = f"{report.name} cannot replace another node: {report.unfit}"
            self._write("detect", "node-unfit", severity=Severity.WARNING, text=text)
        rank = self.ranks.get(index)
        is_current = rank is not None and report.attempt == self.order.attempt
        if report.state is State.LEFT:
            self._remove(report, rank)
        if is_current and report.state is State.FINISHED:
            self._finished.add(rank or 0)
        elif is_current and self.order.runs and report.state is not State.RUNNING:
            self._stop(f"{report.name} stopped: {report.text}", cause=report.event, node=report.name)

    def _remove(self, report: Report, rank: int | None) -> None:
        """Do without a member that ends by itself: it may be replaced if only its node is faulty."""
        del self.members[report.index]
        may_continue = report.code == SupervisorExit.RETRY_ELSEWHERE or rank is None
        if not may_continue or report.index == 0:
            self._end(report.code, report.text, cause=report.event, node=report.name)
            return
        self.lost[report.index] = f"{report.name} left with exit code {report.code}: {report.text}"
        self._write("detect", "node-left", severity=Severity.WARNING, text=self.lost[report.index])

    def lose(self, index: int, why: str) -> None:
        """Note that a member is lost; `why` follows its name in a sentence."""
        if (report := self.members.pop(index, None)) is None or self.has_ended:
            return
        rank, text = self.ranks.get(index), f"{report.name} was lost: {why}."
        self.lost[index] = text
        event = self._write("detect", "node-lost", severity=Severity.ERROR, text=text, fault="peers")
        if index == 0:
            self._end(SupervisorExit.RETRY_ELSEWHERE, f"{text} It is the leader's node.", cause=event)
        elif rank is not None and rank not in self._finished and (self.order.runs or self.order.saves):
            self._stop(text, cause=event, is_lost=True, saves=False)

    def end_superseded(self) -> None:
        """End the job, since another one has resumed its run."""
        if not self.has_ended:
            self._end(SupervisorExit.SUPERSEDED, "Another job has resumed this run, and goes on with it.")

    def decide(self, now: float) -> None:
        """Start an attempt, or end the job, if it is time; its cost grows with the number of nodes."""
        if self.has_ended:
            return
        if self.order.runs:
            self._check_running(now)
            return
        if any(report.state in (State.RUNNING, State.ENDED) for report in self.members.values()):
            self._waiting_since = None
            return
        for index in list(self.members):
            self._replace_suspect(index)
        fit = self._fit()
        size = self._fitting(len(fit))
        if size < self.order.nodes or 0 not in self.members:  # process 0 is on the leader's node
            self._waiting_since = now if self._waiting_since is None else self._waiting_since
            self._gathering_since = None
            seconds = min(self._patience, _RETURN) if self._has_ordered else self._patience
            if now - self._waiting_since >= seconds and size and 0 in self.members:
                self._start(size)
            elif now - self._waiting_since >= seconds:
                absent = [index for index in range(self._nodes + self._spares) if index not in fit]
                unfit = {index: f"{each.name}: {each.unfit}" for index, each in self.members.items() if each.unfit}
                reasons = " ".join(text for index in absent if (text := self.lost.get(index) or unfit.get(index)))
                missing = f"{self._sizes[-1]} nodes are needed, but after {seconds:g} s only {len(fit)}"
                names = f"are there; {_names(absent)} are missing."
                self._end(SupervisorExit.RETRY_ELSEWHERE, f"{missing} {names} {reasons}".strip())
            return
        self._waiting_since = None
        self._gathering_since = now if self._gathering_since is None else self._gathering_since
        may_come = self._nodes + self._spares - len(self.members) - len(self.lost)
        if not self._has_ordered and may_come and now - self._gathering_since < _GATHER:
            return
        self._start(size)

    def _fit(self) -> list[int]:
        """Return the members that can have a rank."""
        return [index for index, report in self.members.items() if not report.unfit or index == 0]

    def _fitting(self, count: int) -> int:
        """Return how many of `count` nodes may train; 0 if they are too few."""
        return next((size for size in self._sizes if size <= count), 0)

    def _check_running(self, now: float) -> None:
        nodes = self.order.nodes
        if len(self._finished) == nodes:
            self._end(SupervisorExit.DONE, f"The command finished in attempt {self.order.attempt}.")
        elif len(self.ranks) == nodes:
            self._incomplete_since = None
            ready = [index for index in self._fit() if self.members[index].state is State.READY]
            size = self._fitting(len(self.ranks.keys() | ready))
            if size <= nodes or self._finished:
                self._gathering_since = None
            elif self._gathering_since is None:
                self._gathering_since = now
            elif now - self._gathering_since > _GATHER:
                text = f"{size} nodes are there, so training saves, and continues on them instead of {nodes}."
                self._stop(text, saves=True)
        elif self._incomplete_since is not None and now - self._incomplete_since > _REJOIN:
            absent = _names(rank for rank in range(nodes) if rank not in self.ranks.values())
            self._stop(f"The nodes with the ranks {absent} did not return to the restarted leader.", is_lost=True)
        if self.order.runs and now - self._looked >= _LOOK:
            self._looked = now
            self._check_progress()

    def _check_progress(self) -> None:
        """Stop the attempt if its processes hang, by the samples of all nodes."""
        running = [report for report in self.members.values() if report.state is State.RUNNING]
        running = [each for each in running if each.attempt == self.order.attempt and each.samples is not None]
        if len(running) + len(self._finished) < self.order.nodes:
            return
        samples, owners = list[Sample](), dict[int, Report]()
        for report in running:
            for sample in report.samples or ():
                number = (report.rank or 0) * report.job["processes"] + sample.process
                samples.append(sample._replace(process=number))
                owners[number] = report
        if (hang := find_hang(samples)) is None:
            return
        nodes = {owners[number].name: owners[number].instance for number in hang.suspects}
        text = f"{hang.words.removesuffix('.')} on {_names(nodes)}."
        if len(nodes) == 1:
            self._suspected.update(nodes.values())
        details = {"fault": "hang", "rank": hang.rank, **hang.details}
        event = self._write("detect", "hang", severity=Severity.ERROR, text=text, **details)
        self._stop(text, cause=event, hang=hang.details["phase"], suspects=hang.suspects)

    def _replace_suspect(self, index: int) -> None:
        """Let a node end that seemed to cause hangs again and again, if a spare can take its rank."""
        report = self.members[index]
        if self._suspected[report.instance] < _HANGS or index == 0 or len(self._fit()) <= self._nodes:
            return
        del self.members[index]
        text = self.lost[index] = f"{report.name} was replaced: it seemed to cause {_HANGS} hangs."
        event = self._write("act", "node-replaced", severity=Severity.WARNING, cause=self.order.event, text=text)
        order = Order(self.order.attempt, text=text, code=SupervisorExit.RETRY_ELSEWHERE, event=event)
        self._replaced[index] = report.instance, order

    def _start(self, size: int) -> None:
        """Start an attempt with so many nodes; those that had a rank keep it if there still is one of that number."""
        self._waiting_since = self._gathering_since = None
        kept = {index: rank for index, rank in self.ranks.items() if index in self.members and rank < size}
        free = sorted(set(range(size)) - set(kept.values()))
        self.ranks = kept | dict(zip(sorted(set(self._fit()) - kept.keys()), free, strict=False))
        self._replacements = self.ranks.keys() - kept.keys() if kept else set()
        self._finished, self._has_ordered = set(), True
        attempt = 1 + max(self.order.attempt, *(report.attempt for report in self.members.values()))
        seats = sorted((rank, index) for index, rank in self.ranks.items())
        ranks = ", ".join(f"{rank}: {self.members[index].name}" for rank, index in seats)
        event = self._write("start", "job-attempt", text=f"Ranks {ranks}", attempt=attempt, cause=self.order.event)
        self.order = Order(attempt, nodes=size, runs=True, nonce=secrets.token_hex(16), event=event)

    def _stop(self, text: str, cause: int | None = None, node: str | None = None, **why: Any) -> None:
        """Stop the attempt because of the event `cause` in the log of `node`, or in the job's own.

        `why` has the fields of `Order` that say more.
        """
        self._has_ordered = True
        details = {"cause": cause, "cause_node": node if cause else None, "action": "restart"}
        event = self._write("decide", "job-stop", severity=Severity.WARNING, text=text, **details)
        self.order = dataclasses.replace(self.order, runs=False, text=printable(text, 500), event=event, **why)

    def _end(self, code: int, text: str, cause: int | None = None, node: str | None = None) -> None:
        severity = Severity.INFO if code in (SupervisorExit.DONE, SupervisorExit.PREEMPTED) else Severity.FATAL
        details = {"cause": cause, "cause_node": node if cause else None, "exit_code": int(code)}
        event = self._write("act", "job-end", severity=severity, text=text, **details)
        self.order = dataclasses.replace(self.order, runs=False, text=printable(text, 500), code=int(code), event=event)


def _names(names: Iterable[object]) -> str:
    return ", ".join(map(str, names))
