"""Time each kernel against XLA's compilation of its reference, against PyTorch, and against the device's peak."""

import argparse
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.benchmark_command import command, medians, share_device, start_result
from benchmarks.kernel_peers import PEERS, peer_call
from zaya_jax.errors import InputError
from zaya_jax.lab.kernel_cases import EIGHT_B, SMALL, Case, Sizes, cases, program
from zaya_jax.lab.measure import preflight as probes
from zaya_jax.lab.measure.timing import Passes, Queue, interleave, interleave_subprocesses, repeated
from zaya_jax.lab.result import write_result
from zaya_jax.lab.subprocesses import run_in_subprocess
from zaya_jax.ops.registry import KernelSelection, Pins, select_kernels
from zaya_jax.ops.target import Target, current_target

Limits = Mapping[str, float]  # see `rooflines`
Row = dict[str, Any]  # see `row`
_ROOFLINES = {"copy": "memory", "dense": "matmul"}  # names of the probes that measure them
# Kernels of libraries that are timed beside the default one.
LIBRARIES = {"attention": {"attention": "cudnn"}, "attention backward": {"attention": "cudnn"}}
SIDES = {"reference": "XLA", "peer": "PyTorch", "cudnn": "cuDNN"}  # what kernels are compared with


def run(parsed: argparse.Namespace) -> dict[str, Any]:
    """Time each Pallas kernel against XLA, PyTorch and the device's peak.

    Without a GPU, the kernels are emulated at a small size, and the times do not predict those of a GPU.

    kernels --only attention --output attention.json
    """
    return bench_kernels(parsed.only, parsed.repeats, parsed.output)


def bench_kernels(only: Sequence[str], repeats: int, output: str | None) -> dict[str, Any]:
    """Time all cases, or those in `only`, on this process' first device; prints and writes to `output` a row for each.

    Returns the measured `rooflines`, and `results` by case (`row`). `failed`: a sentence, if a kernel that the device
    supports did not run. InputError for unknown names.
    """
    share_device()
    target = current_target()
    emulated = target.platform == "cpu"
    sizes, dtype = SMALL if emulated else EIGHT_B, "bfloat16"
    chosen = cases(sizes, dtype)
    if wrong := [name for name in only if name not in chosen]:
        raise InputError(f"--only is {wrong[0]!r}, but must be one of {', '.join(chosen)}.")
    peers = "XLA's compilation of the references, and PyTorch"
    result = start_result("kernels", str(sizes), peers, ("torch", "triton"))
    result["hardware"]["device"], result["emulated"] = target.device_kind, emulated
    if emulated:
        print("JAX found no GPU. Kernels run emulated at a small size; do not compare these times with a GPU.")
    limits = rooflines(emulated, repeats)
    copy, dense = f"{limits['copy'] / 1e9:,.0f} GB/s in copies", f"{limits['dense'] / 1e12:,.3g} TFLOP/s"
    print(f"{target.device_kind}: measured {copy} and {dense} in dense bf16 matmuls.", flush=True)
    rows: dict[str, Any] = {}
    result |= {"rooflines": {name: short(value) for name, value in limits.items()}, "results": rows}
    supported, broken = _selection(sizes, dtype, emulated).chosen.keys(), []
    for name in only or chosen:
        try:
            passes, missing = time_sides(name, sizes, dtype, emulated, repeats)
        except (InputError, RuntimeError) as error:  # in a timed pass, such as a process that ended
            passes, missing = {}, {"kernel": str(error)}
        rows[name] = row(chosen[name], passes, missing, limits)
        print(f"{name}: {sentence(rows[name])}", flush=True)
        if "kernel" in missing and supported & set(chosen[name].operations):
            broken.append(f"{name}: {missing['kernel']}")
            result["failed"] = "These kernels did not run. " + "; ".join(broken)
        write_result(result, output)
    return result


def _selection(sizes: Sizes, dtype: str, emulated: bool, pinned: Pins | None = None) -> KernelSelection:
    target = current_target()
    target = Target("interpret", target.device_kind) if emulated else target
    return select_kernels(target, sizes.model, dtype, None, pinned)


def rooflines(emulated: bool, repeats: int) -> dict[str, float]:
    """Measure 'copy', bytes/s read and written, and 'dense', FLOP/s of bf16 matmuls, both with XLA; medians."""
    sizes = (probes.CPU if emulated else probes.GPU)._replace(dtype="bfloat16")
    passes = interleave_subprocesses({probe: (roofline, probe, sizes) for probe in _ROOFLINES.values()}, repeats)
    seconds = medians({name: per_call(passes[probe]) for name, probe in _ROOFLINES.items()})
    return {name: sizes.work(probe) / seconds[name] for name, probe in _ROOFLINES.items()}


def roofline(probe: str, sizes: probes.Sizes) -> Callable[[], int]:
    """Make a pass of a probe of preflight."""
    return Queue(*probes.probe(probe, sizes)).make_pass()


def time_sides(name: str, sizes: Sizes, dtype: str, emulated: bool, repeats: int) -> tuple[dict, dict[str, str]]:
    """Time 'kernel', 'reference', 'peer' and the libraries; returns passes, and a sentence for each side without."""
    makers: dict[str, tuple[Any, ...]] = {
        side: (our_side, name, sizes, dtype, side == "kernel", emulated) for side in ("kernel", "reference")
    }
    for operation, library in {} if emulated else LIBRARIES.get(name, {}).items():
        makers[library] = (our_side, name, sizes, dtype, True, emulated, {operation: library})
    steps, missing = {}, {"peer": "PyTorch has no counterpart."}
    if name in PEERS:
        makers["peer"] = (peer_side, name, sizes, dtype, "cpu" if emulated else "cuda")
        del missing["peer"]
    with contextlib.ExitStack() as stack:
        for side, maker in makers.items():
            try:
                steps[side] = stack.enter_context(run_in_subprocess(*maker))
            except (InputError, RuntimeError) as error:
                missing[side] = str(error)
        return interleave(steps, repeats), missing


def our_side(
    name: str, sizes: Sizes, dtype: str, kernel: bool, emulated: bool, pinned: Pins | None = None
) -> Callable[[], int]:
    """Make a pass of a case with its kernel or its reference; InputError if the device has no such kernel."""
    case, kernels = cases(sizes, dtype)[name], _selection(sizes, dtype, emulated, pinned)
    if kernel and not kernels.chosen.keys() & set(case.operations):
        raise InputError(f"{name} has no kernel for this device. {kernels}")
    function, arguments = program(case, kernels if kernel else kernels.without(case.operations))
    return Queue(function, arguments, case.held).make_pass()


def peer_side(name: str, sizes: Sizes, dtype: str, device: str) -> Callable[[], int]:
    """Make a pass of a case in PyTorch; InputError if that is not installed."""
    return repeated(*peer_call(name, sizes, dtype, device), 1)


def per_call(passes: Passes) -> list[float]:
    """Return the seconds per call of each pass."""
    return [seconds / calls for seconds, calls in zip(*passes, strict=True)]


def row(case: Case, passes: Mapping[str, Passes], missing: Mapping[str, str], limits: Limits) -> Row:
    """Summarize the passes of a case.

    `seconds` are those per call, `reference`, `peer` and names of libraries how many times as fast the kernel is,
    `of_roofline` its fraction of the measured one. `missing` has the sides without times, and why.
    """
    seconds = {side: per_call(timed) for side, timed in passes.items()}
    typical = medians(seconds)
    summary: Row = {
        "bytes": case.bytes,
        "flops": case.flops,
        "median_seconds": {side: short(time) for side, time in typical.items()},
        "seconds": {side: [short(time) for time in times] for side, times in seconds.items()},
        "missing": dict(missing),
    }
    if "kernel" not in typical:
        return summary
    kernel = typical.pop("kernel")
    summary |= {side: float(f"{time / kernel:.3g}") for side, time in typical.items()}
    summary |= {"bytes_per_second": short(case.bytes / kernel), "flops_per_second": short(case.flops / kernel)}
    roofline = max(case.bytes / limits["copy"], case.flops / limits["dense"])
    return summary | {"of_roofline": float(f"{roofline / kernel:.3g}")}


def short(value: float) -> float:
    """Round to four digits."""
    return float(f"{value:.4g}")


def sentence(summary: Row) -> str:
    """Format a row as text."""
    missing = [f"no {side}: {why}" for side, why in summary["missing"].items()]
    if "kernel" not in summary["median_seconds"]:
        return "; ".join(missing)
    speeds = f"{summary['bytes_per_second'] / 1e9:,.0f} GB/s, {summary['flops_per_second'] / 1e12:.3g} TFLOP/s"
    parts = [f"{summary['median_seconds']['kernel'] * 1e3:.4g} ms, {speeds}"]
    parts += [f"{summary[side]:.3g}× as fast as {name}" for side, name in SIDES.items() if side in summary]
    parts.append(f"{summary['of_roofline']:.0%} of the roofline")
    return "; ".join([*parts, *missing])


ONLY = {"nargs": "+", "default": [], "metavar": "CASE", "help": "cases to time, such as attention (default: all)"}
main = command(run, {"--only": ONLY}, repeats=5)
