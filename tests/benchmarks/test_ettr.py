"""The simulated training time of a job agrees with the formula where that holds, and with hand-made cases."""

import math
import random
import statistics

import pytest

from benchmarks.ettr import Job, simulate

DAY = 86400.0


@pytest.mark.parametrize("spares", [0, 1, 4])
def test_with_rare_faults_simulation_and_formula_agree(spares):
    job = Job(64, spares, DAY / 4, [1.0, 5.0], 300.0, 900.0, DAY / 2, 1.0, 30.0)
    runs = [simulate(job, 200 * DAY, random.Random(seed))[0] for seed in range(5)]
    assert statistics.mean(runs) == pytest.approx(job.formula(), abs=0.003)


def test_without_faults_only_saves_cost_time_and_more_spares_never_lose():
    job = Job(8, 0, 1e12, [1.0], 300.0, 900.0, DAY, 1.0, 30.0)
    part, faults, without = simulate(job, DAY, random.Random(0))
    assert (faults, without) == (1, 1)  # the fault at which the simulation ends
    assert part == pytest.approx(1 / (1 + 1 / math.sqrt(2e12)), rel=1e-5)
    parts = [Job(512, spares, 3600.0, [4.0], 300.0, 900.0, DAY, 1.0, 30.0).formula() for spares in range(40)]
    assert parts == sorted(parts)
