"""Simulate the part of time that a job of many nodes trains, with and without spares, from measured detection times."""

import argparse
import bisect
import json
import math
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.benchmark_command import command, flag
from zaya_jax.config.checks import require
from zaya_jax.lab.result import describe_run, print_tables
from zaya_jax.run.table import Table

MEASURED = Path(__file__).with_name("soak_nodes.json")
_TIMES = "seconds after the fault until the leader noticed it, and until the next step"
_HOUR, _DAY = 3600.0, 86400.0  # seconds
_COLUMNS = ["nodes", "spares", "hours between faults", "trains %", "± %", "formula %", "faults without a spare %"]


class Job(NamedTuple):
    """A job and its cluster; all times in seconds."""

    nodes: int
    spares: int
    between: float  # mean time between two faults of the nodes that train; a spare that waits has none
    detections: Sequence[float]  # times from a fault to its detection, each as likely
    restart: float  # from the detection to the next step, if a spare is ready
    requeue: float  # until the scheduler has another node, if none is
    repair: float  # until a faulty node is a spare again
    stall: float  # of training by a save
    write: float  # until a save is complete

    @property
    def interval(self) -> float:
        """Time between two saves by Young and Daly."""
        return math.sqrt(2 * self.stall * self.between)

    def formula(self) -> float:
        """Return the part of time that trains, to first order; by Erlang's formula no spare is ready at some faults."""
        in_repair, none = self.repair / self.between, 1.0
        for spare in range(1, self.spares + 1):
            none = in_repair * none / (spare + in_repair * none)
        outage = statistics.mean(self.detections) + self.restart + none * self.requeue
        lost = self.interval / 2 + self.write + outage
        return 1 / (1 + self.stall / self.interval + lost / self.between)


def simulate(job: Job, seconds: float, draw: random.Random) -> tuple[float, int, int]:
    """Return the part of `seconds` that trained what counts, the number of faults, and of those without a spare."""
    now, trained, faults, without = 0.0, 0.0, 0, 0
    repaired: list[float] = []  # when faulty nodes are spares again, in order
    fault = draw.expovariate(1 / job.between)
    while now < seconds:
        saves = math.floor((fault - now - job.write) / (job.interval + job.stall))
        trained += max(0, saves) * job.interval
        while True:  # a further one in the meantime starts the recovery again
            now, faults = fault, faults + 1
            del repaired[: bisect.bisect(repaired, now)]
            has_spare = len(repaired) < job.spares
            if has_spare:
                repaired.append(now + job.repair)
            without += not has_spare
            ready = now + draw.choice(job.detections) + job.restart + (0.0 if has_spare else job.requeue)
            fault = now + draw.expovariate(1 / job.between)
            if fault > ready:
                now = ready
                break
    return trained / now, faults, without


def run(parsed: argparse.Namespace) -> dict[str, Any]:
    """Simulate the effective training time of jobs with many nodes.

    Faults of nodes are independent. Detection times are those that tests/aegis/test_node_faults.py measured; all other
    times are assumptions, which flags set. The formula is that of Young and Daly.

    ettr --nodes 1024 --spares 0 8 32
    """
    require(parsed.seeds >= 2, "--seeds", parsed.seeds, "at least 2")
    for name in ("node_hours", "stall", "days"):
        require(getattr(parsed, name) > 0, f"--{name.replace('_', '-')}", getattr(parsed, name), "greater than 0")
    require(min(parsed.nodes) > 0 and min(parsed.spares) >= 0, "--nodes", parsed.nodes, "positive, with spares from 0")
    detections = [times[0] for name, times in json.loads(MEASURED.read_text())[_TIMES].items() if "process" not in name]
    result = describe_run("effective training time, simulated", "", "formula of Young and Daly", ())
    result["assumed"] = {key: value for key, value in vars(parsed).items() if isinstance(value, int | float)}
    result |= {"measured": {"detection, seconds": detections}, "results": []}
    table = list[list[str]]()
    for nodes in parsed.nodes:
        for spares in parsed.spares:
            between = parsed.node_hours * _HOUR / nodes
            times = parsed.restart, parsed.requeue, parsed.repair_hours * _HOUR, parsed.stall, parsed.write
            job = Job(nodes, spares, between, detections, *times)
            runs = [simulate(job, parsed.days * _DAY, random.Random(seed)) for seed in range(parsed.seeds)]
            parts = [100 * part for part, _, _ in runs]
            without = 100 * sum(each[2] for each in runs) / max(1, sum(each[1] for each in runs))
            numbers = between / _HOUR, statistics.mean(parts), statistics.stdev(parts), 100 * job.formula(), without
            row = [nodes, spares, *(round(number, 2) for number in numbers)]
            result["results"].append(dict(zip(_COLUMNS, row, strict=True)))
            table.append([str(value) for value in row])
    print_tables([Table("Effective training time", _COLUMNS, table)])
    return result


FLAGS = {
    "--nodes": flag([128, 1024], "N", "nodes that train"),
    "--spares": flag([0, 2, 8, 32], "N", "spares"),
    "--node-hours": flag(1011.0, "H", "mean time between faults of a node; 1,011 is 7.9 h for 128 nodes"),
    "--restart": flag(300.0, "SECONDS", "from the detection to the next step"),
    "--requeue": flag(900.0, "SECONDS", "until the scheduler has another node"),
    "--repair-hours": flag(24.0, "H", "until a faulty node is a spare again"),
    "--stall": flag(1.0, "SECONDS", "of training by a save"),
    "--write": flag(30.0, "SECONDS", "until a save is complete"),
    "--days": flag(20.7, "DAYS", "simulated"),
    "--seeds": flag(20, "N", "simulated runs"),
}
main = command(run, FLAGS)
