"""The health check of a machine or job."""

import itertools
import math
import socket
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from zaya_jax.config import Config
from zaya_jax.config.checks import counted
from zaya_jax.config.stages import stages
from zaya_jax.job.multihost import all_gather
from zaya_jax.lab.measure.health_check import Check
from zaya_jax.lab.measure.installation import check_installation
from zaya_jax.lab.measure.preflight import PATIENCE, check_job, job_devices
from zaya_jax.lab.measure.training_steps import digests, place_rows, random_tokens
from zaya_jax.lab.result import describe_run, print_once
from zaya_jax.parallel.kernels import validated_kernels
from zaya_jax.train.initialization import initialize
from zaya_jax.train.program import Programs

_STEP_PATIENCE = 1800  # seconds that another process may take to compile and run two steps


def examine(
    config: Config | None, with_step: bool, baseline: Mapping[str, Any] | None, source: str, tolerance: float
) -> dict[str, Any]:
    """Check the installation on every host, and with a configuration the devices of a job; print a line for each check.

    The devices are checked by `check_job`, with its `baseline`, `source` and `tolerance`; `with_step` also runs the
    first training step twice. Returns the result, for JSON: `checks`, a row for each; `failed`, a sentence, if one
    failed. InputError if the baseline is of other devices.
    """
    groups = [_installations()]
    if config is not None:
        groups += [check_job(config, baseline, source, tolerance), *([_repeated_step(config)] if with_step else [])]
    results = list[Check]()
    for check in itertools.chain(*groups):
        check.print()
        results.append(check)
    # Such a result can be the baseline of a later preflight.
    name, peer = ("doctor", "") if config is None else ("preflight", "the other devices, and the baseline")
    result = describe_run(name, f"tolerance {tolerance:.0%}", peer, ())
    result["hardware"] |= {"device": job_devices(), "processes": jax.process_count()}
    result["checks"] = [check._asdict() for check in results]
    if failed := [check.check for check in results if check.status == "FAIL"]:
        result["failed"] = f"Checks that fail: {', '.join(failed)}."
    print_once(str(result.get("failed", "All checks pass.")))
    return result


def _installations() -> Iterator[Check]:
    """Yield the checks of this host, and those of other hosts that do not pass."""
    own = [socket.gethostname(), [list(check) for check in check_installation()]]
    hosts: dict[str, Any] = dict(all_gather("installation", own, PATIENCE))
    first, *others = hosts
    yield from (Check(*check) for check in hosts[first])
    for host in others:
        checks = (Check(*check) for check in hosts[host])
        yield from (check._replace(check=f"{check.check}, {host}") for check in checks if check.status != "PASS")


def _repeated_step(config: Config) -> Iterator[Check]:
    """Run the first training step twice from the same state, on random tokens, and compare every bit."""
    program, stage = Programs(config, validated_kernels(config))[0], stages(config)[0]
    compiled, batch = program.compile(stage), place_rows(program, stage, random_tokens(config))
    runs, seconds, loss = [], 0.0, 0.0
    for _ in range(2):
        state = jax.block_until_ready(initialize(program))
        start = time.perf_counter()
        state, metrics = jax.block_until_ready(compiled(state, batch, {}))
        seconds, loss = time.perf_counter() - start, float(metrics["loss"])
        runs.append(digests((state, metrics)))
    own = [name for name in runs[0] if runs[0][name] != runs[1][name]]
    differing = sorted(set(itertools.chain(*all_gather("step", own, _STEP_PATIENCE))))
    problem = "" if math.isfinite(loss) else f"The loss is {loss}."
    if differing:
        problem += f" {counted(len(differing), 'tensor')} changed when the step was repeated, such as {differing[0]}."
    message = problem.strip() or f"The same twice; loss {loss:.4g}."
    yield Check("training step", "FAIL" if problem else "PASS", round(seconds, 4), "s", message)
