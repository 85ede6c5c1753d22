"""Goodput: which part of a job's time trained steps that counted, computed from the event log alone.

Each second between the first start and the last end is in exactly one bucket: those of Google's ml-goodput-measurement,
and evaluation. A step that is done again after a restart is wasted the first time. Attempts with a fault of a drill are
left out, with the pause after them, and so are pauses after a run that had finished or that Ctrl-C had ended.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

BUCKETS = {
    "productive": ("dispatch", "device_wait"),
    "data_loading": ("data",),
    "device_initialization": ("join",),
    "training_preparation": ("start", "open"),
    "program_startup": ("compile",),
    "checkpoint_restore": ("restore",),
    "checkpoint_save": ("save",),
    "evaluation": ("evaluate",),
    "wasted_progress": (),
    "infrastructure_recovery": (),
    "other": ("finish", "end"),
}
_BUCKET_OF = {phase: bucket for bucket, phases in BUCKETS.items() for phase in phases}
_INTERRUPTED = 130  # exit status after Ctrl-C


@dataclasses.dataclass(frozen=True)
class Goodput:
    """The use of a job's time."""

    buckets: Mapping[str, float]  # seconds by bucket; they add up to `seconds`
    seconds: float  # between the first start and the last end, without excluded attempts
    attempts: int  # number of attempts, excluded ones not counted
    steps: int  # number of steps that count
    wasted_steps: int  # number of steps that were done again

    @property
    def fraction(self) -> float:
        """The productive part of the time; also called effective training time ratio (ETTR). 0 without any time."""
        return self.buckets["productive"] / self.seconds if self.seconds > 0 else 0.0


@dataclasses.dataclass
class _Done:
    """Steps done in one attempt that still count."""

    first: int
    last: int
    seconds: float  # of productive time


def measure_goodput(
    events: Sequence[Mapping[str, Any]], now: float | None = None, running: Mapping[str, Any] | None = None
) -> Goodput:
    """Compute the goodput of one node from its events.

    An attempt that runs is counted up to `now`, in seconds since the epoch, if that is given; `running` has its
    `attempt`, `times`, `first_step` and `last_step` so far, if they are known.
    """
    buckets = dict.fromkeys(BUCKETS, 0.0)
    drills = {event["attempt"] for event in events if event["kind"] == "inject"}
    starts = [event for event in events if event["kind"] == "start"]
    ends = {event["attempt"]: event for event in events if event["kind"] == "end"}
    done: list[_Done] = []
    wasted_steps, seconds = 0, 0.0
    for start, following in itertools.zip_longest(starts, starts[1:]):
        if start["attempt"] in drills:
            continue
        end = ends.get(start["attempt"])
        if end is None and following is None and running and running["attempt"] == start["attempt"]:
            end = {"code": "finished", "unix": now, **running}
        if end is None:  # it runs, or its supervisor was killed
            until = now if following is None else following["unix"]
            unknown = 0.0 if until is None else max(until - start["unix"], 0.0)
            buckets["other" if following is None else "infrastructure_recovery"] += unknown
            seconds += unknown
            continue
        # The run was over, or a person ended it: then the pause after it is no failure's.
        was_wanted = end["code"] == "finished" or _INTERRUPTED in end.get("exit_statuses", ())
        pause = 0.0 if following is None or was_wanted else max(following["unix"] - end["unix"], 0.0)
        clock = "monotonic" if "monotonic" in start and "monotonic" in end else "unix"  # better one that nobody sets
        duration = end[clock] - start[clock]
        seconds += duration + pause
        buckets["infrastructure_recovery"] += pause
        times: Mapping[str, float] = end.get("times") or {}
        for phase, spent in times.items():
            buckets[_BUCKET_OF.get(phase, "other")] += spent
        rest = duration - sum(times.values())
        buckets["other" if end["code"] == "finished" else "infrastructure_recovery"] += rest
        if end.get("first_step") is None:
            continue
        lost, lost_seconds = _truncate(done, end["first_step"])
        wasted_steps += lost
        buckets["productive"] -= lost_seconds
        buckets["wasted_progress"] += lost_seconds
        productive = sum(spent for phase, spent in times.items() if _BUCKET_OF.get(phase) == "productive")
        if end["last_step"] == end["first_step"]:  # its first step did not end
            buckets["productive"] -= productive
            buckets["wasted_progress"] += productive
        done.append(_Done(end["first_step"], end["last_step"], productive))
    counted = sum(start["attempt"] not in drills for start in starts)
    return Goodput(buckets, seconds, counted, sum(each.last - each.first for each in done), wasted_steps)


def _truncate(done: list[_Done], step: int) -> tuple[int, float]:
    """Drop the steps after `step`; return their number and seconds, at the mean rate of their attempt."""
    steps, seconds = 0, 0.0
    for each in done:
        lost = min(max(each.last - step, 0), each.last - each.first)
        if lost > 0:
            part = each.seconds * lost / (each.last - each.first)
            each.last, each.seconds = each.last - lost, each.seconds - part
            steps, seconds = steps + lost, seconds + part
    return steps, seconds
