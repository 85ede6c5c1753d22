"""The dry run: estimate every phase, and compile its step for simulated devices to prove that it partitions."""

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from zaya_jax.config import Config, to_yaml
from zaya_jax.errors import InputError
from zaya_jax.hardware.data_sheets import Hardware, get_hardware
from zaya_jax.machine.dry_run.estimate import REACHED, PhaseEstimate, advice, estimate_phase, simulated_programs
from zaya_jax.run.progress import track

_GB = 1e9
# The program is compiled but never run, so optimisation would only cost time. The disabled pass would expand every
# all-to-all into one slice per device, which takes minutes for a thousand devices.
_SIMULATED = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_disable_hlo_passes=all_to_all_decomposer",
}


def dry_run(config: Config, devices: int, hardware: str | None = None, as_json: bool = False) -> str:
    """Estimate each phase on `devices` devices, and compile its step for that many.

    Args:
      config: configuration of the run.
      devices: number of devices in the job.
      hardware: name in `hardware.data_sheets.HARDWARE`; None to leave out times and the comparison with its memory.
      as_json: return JSON instead of a table for each phase.

    Returns:
      The report, to be printed.

    Raises:
      InputError: `devices` is below 1, `hardware` is unknown, or a layout or batch does not fit the devices.
    """
    if devices < 1:
        raise InputError(f"--devices is {devices}, but must be at least 1.")
    config.check()
    device = None if hardware is None else get_hardware(hardware)
    programs = simulated_programs(config, devices)
    estimates = [estimate_phase(programs, phase, device) for phase in range(len(config.phases))]
    phases = track("compiling the step of", range(len(config.phases)), config.phase_key)
    proofs = [prove(config, phase, devices) for phase in phases]
    if as_json:
        rows = [
            {
                **estimate._asdict(),
                "memory": {**estimate.memory._asdict(), "total": estimate.memory.total},
                "transfers": [transfer._asdict() for transfer in estimate.transfers],
                "compiled": proof,
            }
            for estimate, proof in zip(estimates, proofs, strict=True)
        ]
        return json.dumps({"devices": devices, "hardware": hardware, "phases": rows}, indent=1)
    tables = [_table(estimate, proof, device) for estimate, proof in zip(estimates, proofs, strict=True)]
    return "\n\n".join([_heading(devices, hardware, device), *tables])


def _heading(devices: int, name: str | None, device: Hardware | None) -> str:
    first = "1 device" if devices == 1 else f"{devices:,} devices"
    if device is not None:
        first += (f", {name}: {device.memory / _GB:.0f} GB at {device.bandwidth / 1e12:.2f} TB/s, "
                  f"{device.peak / 1e12:.0f} TFLOP/s in bf16; links {device.intra_node / _GB:.0f} GB/s within a node "
                  f"of {device.node_size}, {device.inter_node / _GB:.0f} GB/s between nodes")  # fmt: skip
    return f"{first}\nMemory, FLOPs and times are estimates from shapes and data sheets, not measurements."


def prove(config: Config, phase: int, devices: int) -> dict[str, Any]:
    """Compile the step of a phase in a subprocess that simulates the devices.

    A step with a ragged exchange, which CPUs do not support, is only lowered, for GPUs.

    Returns:
      `proof` ("compiled" or "lowered"), `seconds` it took, and the peak `host_bytes` of the subprocess.

    Raises:
      InputError: the step does not compile.
    """
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(to_yaml(config), encoding="utf-8")
        process = subprocess.run(  # noqa: S603 (this program, on a file of our own)
            [sys.executable, "-m", "zaya_jax.machine.dry_run.prove", str(path), str(phase)], capture_output=True,
            text=True, check=False, env={**os.environ, **_SIMULATED, "JAX_NUM_CPU_DEVICES": str(devices)},
        )  # fmt: skip
    if process.returncode:
        errors = process.stderr.strip().splitlines() or [f"signal {-process.returncode} killed the compiler"]
        raise InputError(f"The step of {config.phase_key(phase)} cannot be compiled for {devices} "
                         f"devices: {errors[-1][:300]}")  # fmt: skip
    return {**json.loads(process.stdout), "seconds": round(time.monotonic() - start, 1)}


def _table(estimate: PhaseEstimate, proof: dict[str, Any], hardware: Hardware | None) -> str:
    """Format a phase as text: first whether it fits and how fast it is, then the details."""
    memory, axes = estimate.memory, " × ".join(f"{name} {size}" for name, size in estimate.axes.items() if size > 1)
    lines = [
        *_answer(estimate, hardware),
        f"  layout: {axes or 'one device'}; remat {estimate.remat}",
        f"  step: {estimate.tokens:,} tokens; per device {estimate.micro_batches} × micro_batch {estimate.sequences}",
        f"  {proof['proof']} for this layout in {proof['seconds']} s, with {proof['host_bytes'] / _GB:.1f} GB of this "
        "machine's memory",
        "  memory per device",
        *(f"    {name:<14}{size / _GB:10.2f} GB" for name, size in memory._asdict().items()),
        f"    {'peak':<14}{memory.total / _GB:10.2f} GB = parameters + optimizer + frozen + max(update, "
        "everything else)",
        "  FLOPs per step, all devices",
        *(f"    {name:<14}{count / 1e12:12,.1f} TFLOP" for name, count in estimate.flops.items()),
        "  sent per device per step" + ("" if estimate.transfers else ": nothing"),
        *(
            f"    {transfer.what}, {transfer.kind} over {', '.join(transfer.axes)}: {transfer.bytes / _GB:.3f} GB"
            for transfer in estimate.transfers
        ),
    ]
    if estimate.bounds:
        bounds = ", ".join(f"{name} {value:.3f}" for name, value in estimate.bounds.items())
        lines.append(f"  lower bounds in s/step, each at 100% of its peak: {bounds}")
    return "\n".join(lines)


def _answer(estimate: PhaseEstimate, hardware: Hardware | None) -> list[str]:
    """Format whether a phase fits the memory of a device, and its speed; without hardware, only the memory."""
    needed = f"{estimate.memory.total / _GB:.1f}"
    if hardware is None or estimate.step_seconds is None or estimate.days is None:
        return [f"Phase {estimate.phase}: {needed} GB per device"]
    of = f"{needed} of {hardware.memory / _GB:.0f} GB per device"
    if changes := advice(estimate, hardware):
        fit = [f"Phase {estimate.phase}: DOES NOT FIT, {of}", f"  try: {'; '.join(changes)}"]
    else:
        fit = [f"Phase {estimate.phase}: fits, {of}"]
    speed = estimate.tokens / estimate.step_seconds / math.prod(estimate.axes.values())
    times = {**estimate.bounds, "compute": estimate.bounds["compute"] / REACHED}
    limit = max(times, key=lambda name: times[name])
    return [
        *fit,
        f"  {estimate.step_seconds:.2f} s/step, {speed:,.0f} tokens/s per device, {estimate.days:.1f} days; "
        f"limited by {limit} (compute counted at {REACHED:.0%} of peak)",
    ]
