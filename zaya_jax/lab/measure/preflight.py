"""Check the devices of a job, and compare with a recorded baseline."""

import functools
import socket
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from zaya_jax.config import Config
from zaya_jax.errors import InputError
from zaya_jax.job.multihost import all_gather, broadcast
from zaya_jax.lab.measure.collectives.operations import COLLECTIVES, label
from zaya_jax.lab.measure.collectives.programs import Case, Programs, check_collectives
from zaya_jax.lab.measure.gemm import squares
from zaya_jax.lab.measure.health_check import Check, format_quantity
from zaya_jax.lab.measure.memory import ITEM, KERNELS
from zaya_jax.lab.measure.timing import time_calls
from zaya_jax.lab.result_tables import UNITS
from zaya_jax.parallel.kernels import validated_kernels
from zaya_jax.parallel.mesh import AXES, make_mesh, nontrivial_axes

PATIENCE = 600  # seconds that another process may take, which compiles
_PASSES, _WARM_UP = 15, 3
Units = list[list[Any]]  # nodes, or single devices of a node
ROUNDS = 5  # in which something must be slow; the fastest counts, since other work on a host passes


class Sizes(NamedTuple):
    """Sizes of the probes."""

    matrix: int  # rows and columns of the square matrices
    dtype: str  # of the matrices
    array: int  # bytes of the copied array
    message: int  # bytes of a collective

    def work(self, name: str) -> float:
        """Return the FLOPs of 'matmul', or the bytes that 'memory' reads and writes."""
        return 2.0 * self.matrix**3 if name == "matmul" else 2.0 * self.array


CPU = Sizes(512, "float32", 2**24, 2**20)
GPU = Sizes(8192, "bfloat16", 2**30, 2**27)


def check_job(config: Config, baseline: Mapping[str, Any] | None, source: str, tolerance: float) -> Iterator[Check]:
    """Check the devices of this job, with the kernels of its configuration.

    A `baseline`, of which that of process 0 counts, is the result of an earlier preflight; `source` says where it is
    from. What is slower by the fraction `tolerance` is slow. InputError if the baseline is of other devices.
    """
    received: Any = broadcast(None if baseline is None else dict(baseline))
    recorded = {} if received is None else _recorded(received, source, job_devices())
    for check in _checks(config, tolerance):
        yield _compare(recorded, check, tolerance)


def _checks(config: Config, tolerance: float) -> Iterator[Check]:
    sizes = CPU if jax.default_backend() == "cpu" else GPU
    hosts = [str(host) for host in all_gather("preflight", socket.gethostname(), PATIENCE)]
    names = _device_names(hosts)
    kernels = validated_kernels(config)  # those with wrong results are replaced, which costs time
    status, count = "WARN" if kernels.reasons else "PASS", float(len(kernels.kernels))
    yield Check("kernels", status, count, "kernels", " ".join(kernels.reasons.values()))
    yield _slowest("matmul", "FLOP/s", sizes, names, tolerance)
    yield _slowest("memory", "bytes/s", sizes, names, tolerance)
    found = check_collectives()
    status, message = "FAIL" if "failed" in found else "PASS", found.get("failed") or found.get("skipped", "")
    yield Check("collectives", status, None, "", message)
    for operation in ("all_reduce", "all_gather") if jax.device_count() > 1 else ():
        yield _collective(operation, sizes, hosts, names, tolerance)


def job_devices() -> str:
    """Name the devices of the job."""
    return f"{jax.device_count()} × {jax.devices()[0].device_kind}"


def _slowest(name: str, unit: str, sizes: Sizes, names: Mapping[int, str], tolerance: float) -> Check:
    """Compare the devices with their median."""
    speeds, slow = dict.fromkeys(names, 0.0), dict[int, float]()
    for _ in range(ROUNDS):
        measured = device_speeds(name, sizes)
        if failed := [f"{names[device]} fails: {it}." for device, it in measured.items() if isinstance(it, str)]:
            return Check(name, "FAIL", None, unit, " ".join(failed))
        speeds = {device: max(speed, float(measured[device])) for device, speed in speeds.items()}
        typical = statistics.median(speeds.values())
        slow = {device: speed / typical for device, speed in speeds.items() if speed < (1 - tolerance) * typical}
        if not slow:
            break
    messages = [f"{names[device]} reaches {share:.0%} of the median." for device, share in slow.items()]
    return Check(name, "FAIL" if slow else "PASS", min(speeds.values()), unit, " ".join(messages))


def _collective(
    operation: str, sizes: Sizes, hosts: Sequence[str], names: Mapping[int, str], tolerance: float
) -> Check:
    nodes: dict[str, list[Any]] = {}
    for device in sorted(jax.devices(), key=lambda device: (device.process_index, device.id)):
        nodes.setdefault(hosts[int(device.process_index)], []).append(device)
    devices = [device for node in nodes.values() for device in node]
    whole = max(bandwidth(operation, devices, sizes) for _ in range(ROUNDS))
    slow = find_slow(list(nodes.values()), lambda group: bandwidth(operation, group, sizes), tolerance)
    message = f"Slow: {', '.join(names[device.id] for device in slow)}." if slow else ""
    return Check(label(COLLECTIVES[operation]), "FAIL" if slow else "PASS", whole, "bytes/s", message)


def _compare(recorded: Mapping[str, Any], check: Check, tolerance: float) -> Check:
    before = recorded.get(check.check)
    if check.unit not in UNITS or not before or check.value is None or check.value >= (1 - tolerance) * before:
        return check
    message = f"{check.value / before:.0%} of the baseline, {format_quantity(before, check.unit)}. {check.message}"
    return check._replace(status="FAIL", message=message.strip())


def _recorded(baseline: Mapping[str, Any], source: str, device: str) -> dict[str, float]:
    """Return the measured values of the baseline by check."""
    try:
        before = baseline["hardware"]["device"]
        if before == device:
            return {row["check"]: float(row["value"]) for row in baseline["checks"] if row["value"] is not None}
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{source} has a damaged row or field ({error!r}): record another with --output.") from error
    advice = "leave it out, and record another with --output"
    raise InputError(f"{source} is of {before}, but this job has {device}: {advice}.")


def _device_names(hosts: Sequence[str]) -> dict[int, str]:
    """Name each device of the job, with its process and host."""
    names = {}
    for device in jax.devices():
        process = int(device.process_index)
        where = f" (process {process}, host {hosts[process]})" if len(hosts) > 1 else ""
        names[device.id] = f"device {device.id}{where}"
    return names


def device_speeds(name: str, sizes: Sizes) -> dict[int, float | str]:
    """Return by id of each device of the job its FLOP/s, its bytes/s of the copy, or the first line of its error."""
    own = [(device.id, _speed(name, device, sizes)) for device in jax.local_devices()]
    return dict(speed for process in all_gather("preflight", own, PATIENCE) for speed in process)


def _speed(name: str, device: Any, sizes: Sizes) -> float | str:
    try:
        function, arrays = probe(name, sizes)
        return sizes.work(name) / _shortest(jax.jit(function), *jax.device_put(arrays, device))
    except jax.errors.JaxRuntimeError as error:  # such as memory that another program holds
        return str(error).splitlines()[0]


def probe(name: str, sizes: Sizes) -> tuple[Callable[..., jax.Array], tuple[jax.Array, ...]]:
    """Return the function of 'matmul' or 'memory', and its arrays on the default device."""
    if name == "matmul":
        (square,) = squares([sizes.matrix], sizes.dtype)
        return square.run, tuple(jnp.full(x.shape, 1 / sizes.matrix, x.dtype) for x in square.arrays)
    return lambda a: KERNELS["Copy"].run(a, a), (jnp.zeros(sizes.array // ITEM, jnp.float32),)


def bandwidth(operation: str, devices: Sequence[Any], sizes: Sizes) -> float:
    """Return a collective's bus bandwidth over `devices`, in bytes/s, by the shortest call; all processes call it."""
    mesh = make_mesh(devices=devices)
    probe = Case(COLLECTIVES[operation], mesh, nontrivial_axes(mesh, AXES), 1, "float32")
    case = probe._replace(elements=probe.collective.elements(sizes.message, 4, len(devices)))
    own = None
    if any(device.process_index == jax.process_index() for device in devices):
        programs = _programs(case)
        own = _shortest(programs.run, programs.fill())
    seconds = [process for process in all_gather("preflight", own, PATIENCE) if process is not None]
    return case.bus_bandwidth(max(seconds))


_programs = functools.lru_cache(maxsize=16)(Programs)  # every round measures the same groups


def _shortest(call: Callable[..., Any], *arrays: jax.Array) -> float:
    """Return the seconds of the shortest call: what else runs on a host only makes calls longer."""
    return min(time_calls(lambda: jax.block_until_ready(call(*arrays)), _PASSES, _WARM_UP).seconds)


def find_slow(nodes: Sequence[Sequence[Any]], measure: Callable[[list[Any]], float], tolerance: float) -> list[Any]:
    """Return the devices that slow a collective down: the smallest group slower than another of its size; [] if none.

    Halves have the same number of `nodes`, or of devices of one node, so that equal links give equal bandwidths, which
    `measure` returns for two devices and more. The slower half is searched if the relative difference exceeds
    `tolerance` in `ROUNDS` measurements. A single node or device is measured together with one that was found good. Two
    or three devices in all, and the network of two or three nodes, cannot be told apart.
    """
    every = [list(node) for node in nodes]
    slow, good = _bisect(every, [], measure, tolerance) if len(every) > 1 else (every, [])
    if len(slow) != 1:
        return list(chain(*slow))
    (node,) = slow
    inside, _ = _bisect([[device] for device in node], [[device] for device in chain(*good)], measure, tolerance)
    return list(chain(*inside)) or (node if len(every) > 1 else [])


def _bisect(units: Units, good: Units, measure: Callable[[list[Any]], float], tolerance: float) -> tuple[Units, Units]:
    """Return the slow ones of `units`, [] if none is, and some that are good, at first those that are known."""

    def slower(first: Units, second: Units, partner: Units) -> int | None:
        """Return which of two groups is slower; None if neither is."""
        groups = [[*chain(*(partner[:1] if len(first) == 1 else []), *half)] for half in (first, second)]
        fastest = [0.0, 0.0]
        for _ in range(ROUNDS):
            fastest = [max(speed, measure(group)) for speed, group in zip(fastest, groups, strict=True)]
            if min(fastest) >= (1 - tolerance) * max(fastest):
                return None
        return fastest.index(min(fastest))

    suspects, is_slow = units, False
    while len(suspects) > 1:
        middle = len(suspects) // 2
        halves, last = (suspects[:middle], suspects[middle : 2 * middle]), suspects[2 * middle :]
        if not good and len(list(chain(*halves[0]))) == 1:
            break
        index = slower(*halves, good)
        if index is not None:
            suspects, good, is_slow = halves[index], halves[1 - index], True
        elif last and slower([*last, *halves[0][1:]], halves[0], halves[1]) == 0:
            return last, halves[0]
        else:
            break
    return (suspects if is_slow else []), good
