"""Time each kernel against XLA's compilation of its reference, against PyTorch, and against the device's peak.

Each side runs in its own process, in turn. A pass queues many calls before it waits, to time the device and not the
launch overhead.
"""

import argparse
import contextlib
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.benchmark_command import run_benchmark
from benchmarks.kernel_peers import PEERS, peer_call
from zaya_jax.errors import InputError
from zaya_jax.lab.kernel_cases import EIGHT_B, SMALL, Aim, Case, Sizes, cases, program
from zaya_jax.lab.measure import preflight as probes
from zaya_jax.lab.measure.timing import Passes, Queue, interleave, interleave_subprocesses, repeated
from zaya_jax.lab.result import describe_run, write_result
from zaya_jax.lab.subprocesses import run_in_subprocess
from zaya_jax.ops.registry import KernelSelection, select_kernels
from zaya_jax.ops.target import Target, current_target
from zaya_jax.run.parser import Parser

_ROOFLINES = {"copy": "memory", "dense": "matmul"}  # names of the probes that measure them


def bench_kernels(only: Sequence[str], repeats: int, output: str | None) -> dict[str, Any]:
    """Time all cases, or those in `only`, on this process' first device; prints a line for each.

    On a CPU kernels are emulated at a small size, which shows that everything runs, but says nothing about a GPU's
    times.

    Args:
      only: names of cases; empty for all.
      repeats: number of timed passes of each side.
      output: JSON file, written after each case; None for no file.

    Returns:
      What was written: the measured `rooflines`, and `results` by case (`row`). `failed`: a sentence, if a kernel that
      the device supports did not run.

    Raises:
      InputError: `only` contains an unknown name.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # processes share the GPU
    target = current_target()
    emulated = target.platform == "cpu"
    sizes, dtype = (SMALL, "bfloat16") if emulated else (EIGHT_B, "bfloat16")
    chosen = cases(sizes, dtype)
    if wrong := [name for name in only if name not in chosen]:
        raise InputError(f"--only is {wrong[0]!r}, but must be one of {', '.join(chosen)}.")
    result = describe_run("kernels", str(sizes), "XLA's compilation of the references, and PyTorch",
                          ("torch", "triton"))  # fmt: skip
    result["hardware"]["device"], result["emulated"] = target.device_kind, emulated
    if emulated:
        print("JAX found no GPU. Kernels run emulated at a small size; do not compare these times with a GPU.")
    limits = rooflines(emulated, repeats)
    print(f"{target.device_kind}: measured {limits['copy'] / 1e9:,.0f} GB/s in copies and "
          f"{limits['dense'] / 1e12:,.3g} TFLOP/s in dense bf16 matmuls.", flush=True)  # fmt: skip
    result["rooflines"] = {name: float(f"{value:.4g}") for name, value in limits.items()}
    result["results"] = {}
    supported, broken = _selection(sizes, dtype, emulated).chosen.keys(), []
    for name in only or chosen:
        try:
            passes, missing = time_sides(name, sizes, dtype, emulated, repeats)
        except (InputError, RuntimeError) as error:  # in a timed pass, such as a process that ended
            passes, missing = {}, {"kernel": str(error)}
        result["results"][name] = row(chosen[name], passes, missing, limits, target.device_kind)
        print(f"{name}: {sentence(result['results'][name])}", flush=True)
        if "kernel" in missing and supported & set(chosen[name].operations):
            broken.append(f"{name}: {missing['kernel']}")
            result["failed"] = "These kernels did not run. " + "; ".join(broken)
        write_result(result, output)
    return result


def _selection(sizes: Sizes, dtype: str, emulated: bool) -> KernelSelection:
    target = current_target()
    return select_kernels(Target("interpret", target.device_kind) if emulated else target, sizes.model, dtype)


def rooflines(emulated: bool, repeats: int) -> dict[str, float]:
    """Measure 'copy', bytes/s read and written, and 'dense', FLOP/s of bf16 matmuls, both with XLA; medians."""
    sizes = (probes.CPU if emulated else probes.GPU)._replace(dtype="bfloat16")
    passes = interleave_subprocesses({probe: (roofline, probe, sizes) for probe in _ROOFLINES.values()}, repeats)
    return {name: sizes.work(probe) / statistics.median(per_call(passes[probe])) for name, probe in _ROOFLINES.items()}


def roofline(probe: str, sizes: probes.Sizes) -> Callable[[], int]:
    """Make a pass of a probe of preflight."""
    return Queue(*probes.probe(probe, sizes)).make_pass()


def time_sides(name: str, sizes: Sizes, dtype: str, emulated: bool, repeats: int) -> tuple[dict, dict[str, str]]:
    """Time 'kernel', 'reference' and 'peer'; returns their passes, and a sentence for each that is missing."""
    makers: dict[str, tuple[Any, ...]] = {
        side: (our_side, name, sizes, dtype, side == "kernel", emulated) for side in ("kernel", "reference")
    }
    missing = {}
    if name in PEERS:
        makers["peer"] = (peer_side, name, sizes, dtype, "cpu" if emulated else "cuda")
    else:
        missing["peer"] = "PyTorch has no counterpart."
    with contextlib.ExitStack() as stack:
        steps = {}
        for side, (make, *arguments) in makers.items():
            try:
                steps[side] = stack.enter_context(run_in_subprocess(make, *arguments))
            except (InputError, RuntimeError) as error:
                missing[side] = str(error)
        return interleave(steps, repeats), missing


def our_side(name: str, sizes: Sizes, dtype: str, kernel: bool, emulated: bool) -> Callable[[], int]:
    """Make a pass of a case with its kernel or its reference.

    Raises:
      InputError: it does not compile or run.
    """
    case, kernels = cases(sizes, dtype)[name], _selection(sizes, dtype, emulated)
    if kernel and not kernels.chosen.keys() & set(case.operations):
        raise InputError(f"{name} has no kernel for this device. {kernels}")
    try:
        function, arguments = program(case, kernels if kernel else kernels.without(case.operations))
        return Queue(function, arguments, case.held).make_pass()
    except Exception as error:  # not every error can be sent to another process
        raise InputError(f"{type(error).__name__}: {str(error)[:500]}") from error


def peer_side(name: str, sizes: Sizes, dtype: str, device: str) -> Callable[[], int]:
    """Make a pass of a case in PyTorch.

    Raises:
      InputError: PyTorch is not installed, or does not support the case.
    """
    try:
        return repeated(*peer_call(name, sizes, dtype, device), 1)
    except InputError:
        raise
    except Exception as error:  # not every error can be sent to another process
        raise InputError(f"{type(error).__name__}: {str(error)[:500]}") from error


def per_call(passes: Passes) -> list[float]:
    """Return the seconds per call of each pass."""
    return [seconds / calls for seconds, calls in zip(*passes, strict=True)]


def row(case: Case, passes: Mapping[str, Passes], missing: Mapping[str, str], limits: Mapping[str, float],
        device: str) -> dict[str, Any]:  # fmt: skip
    """Summarize the passes of a case.

    Returns:
      `seconds`: seconds per call in every pass of each side; `median_seconds`: their medians. `reference`, `peer`: how
      many times as fast the kernel is. `bytes_per_second`, `flops_per_second`: speed of the kernel. `aim`: the goal,
      the value `reached`, and whether it is `met` (None on devices other than an H200). `missing`: sides without times,
      and why.
    """
    seconds = {side: per_call(timed) for side, timed in passes.items()}
    medians = {side: statistics.median(times) for side, times in seconds.items()}
    summary: dict[str, Any] = {
        "bytes": case.bytes,
        "flops": case.flops,
        "median_seconds": {side: float(f"{time:.4g}") for side, time in medians.items()},
        "seconds": {side: [float(f"{time:.4g}") for time in times] for side, times in seconds.items()},
        "missing": dict(missing),
    }
    if "kernel" not in medians:
        return summary
    kernel = medians.pop("kernel")
    summary |= {side: float(f"{time / kernel:.3g}") for side, time in medians.items()}
    summary["bytes_per_second"] = float(f"{case.bytes / kernel:.4g}")
    summary["flops_per_second"] = float(f"{case.flops / kernel:.4g}")
    if case.aim:
        reached = reach(case, case.aim, kernel, medians, limits)
        met = reached is not None and reached >= case.aim.least if "H200" in device else None
        summary["aim"] = {"of": case.aim.of, "least": case.aim.least, "met": met,
                          "reached": None if reached is None else float(f"{reached:.3g}")}  # fmt: skip
    return summary


def reach(
    case: Case, aim: Aim, kernel: float, others: Mapping[str, float], limits: Mapping[str, float]
) -> float | None:
    """Return the value to compare with the goal, for a call of `kernel` seconds; None if the reference is missing."""
    match aim.of:
        case "copy":
            return case.bytes / kernel / limits["copy"]
        case "dense":
            return case.flops / kernel / limits["dense"]
        case "roofline":
            return max(case.bytes / limits["copy"], case.flops / limits["dense"]) / kernel
        case "tflops":
            return case.flops / kernel / 1e12
        case "reference":
            return others["reference"] / kernel if "reference" in others else None


_QUANTITIES = {
    "copy": "fraction of the copy bandwidth",
    "dense": "fraction of the dense matmul rate",
    "roofline": "fraction of the roofline",
    "tflops": "TFLOP/s",
    "reference": "speed relative to XLA",
}


def sentence(summary: Mapping[str, Any]) -> str:
    """Format a row as text."""
    missing = [f"no {side}: {why}" for side, why in summary["missing"].items()]
    if "kernel" not in summary["median_seconds"]:
        return "; ".join(missing)
    parts = [f"{summary['median_seconds']['kernel'] * 1e3:.4g} ms, {summary['bytes_per_second'] / 1e9:,.0f} GB/s, "
            f"{summary['flops_per_second'] / 1e12:.3g} TFLOP/s"]  # fmt: skip
    names = {"reference": "XLA", "peer": "PyTorch"}
    parts += [f"{summary[side]:.3g}× as fast as {name}" for side, name in names.items() if side in summary]
    if aim := summary.get("aim"):
        verdict = {True: "met", False: "missed", None: "for an H200"}[aim["met"]]
        parts.append(f"{_QUANTITIES[aim['of']]} {aim['reached']} (goal {aim['least']:g}, {verdict})")
    return "; ".join([*parts, *missing])


def main(arguments: Sequence[str]) -> int:
    """Run this benchmark; see `benchmark_command.run_benchmark`."""
    return run_benchmark(_run, arguments, _add, repeats=5)


def _add(parser: Parser) -> None:
    parser.add_argument("--only", metavar="CASE", nargs="+", default=[],
                        help="cases to time, such as attention (default: all)")  # fmt: skip


def _run(parsed: argparse.Namespace) -> dict[str, Any]:
    """Time each Pallas kernel against XLA, PyTorch and the device's peak.

    Without a GPU, the kernels are emulated at a small size, and the times do not predict those of a GPU.

    kernels --only attention --output attention.json
    """
    return bench_kernels(parsed.only, parsed.repeats, parsed.output)
