"""The dry run: estimates of all phases, and the proof that their steps partition."""

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

_GB = 1e9
# The program is not run: code for the CPU need not be good, only soon there. The pass that is left out would write
# every all-to-all as a slice for each device, which takes minutes for a thousand.
_SIMULATED = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_disable_hlo_passes=all_to_all_decomposer",
}


def dry_run(config: Config, devices: int, hardware: str | None = None, as_json: bool = False) -> str:
    """What each phase would take on `devices` devices, after its step was compiled for that many.

    Args:
      config: of the run.
      devices: of the job.
      hardware: their name in `hardware.HARDWARE`; without it there is nothing to compare with.
      as_json: JSON in place of tables.

    Raises:
      InputError: there are no devices, no data sheet of the hardware, or a layout or a batch cannot be.
    """
    if devices < 1:
        raise InputError(f"--devices is {devices}, but must be at least 1.")
    config.check()
    device = None if hardware is None else get_hardware(hardware)
    programs = simulated_programs(config, devices)
    estimates = [estimate_phase(programs, phase, device) for phase in range(len(config.phases))]
    proofs = [prove(config, phase, devices) for phase in range(len(config.phases))]
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
    first = "One device" if devices == 1 else f"{devices} devices"
    if device is not None:
        first += (f", {name}: {device.memory / _GB:.0f} GB, {device.peak / 1e12:.0f} TFLOP/s, memory "
                  f"{device.bandwidth / 1e12:.2f} TB/s, {device.intra_node / _GB:.0f} GB/s to the "
                  f"{device.node_size} of a node, {device.inter_node / _GB:.0f} GB/s beyond")  # fmt: skip
    return (f"{first}\nEach step was compiled (or lowered) for as many devices, which shows that it partitions.\n"
            "Bytes, operations and times are computed: from the sharding table, the traced program and data sheets, "
            "not from what was compiled.")  # fmt: skip


def prove(config: Config, phase: int, devices: int) -> dict[str, Any]:
    """Compile the step of a phase in a process that simulates the devices: seconds it took, and its memory.

    A ragged exchange, which CPUs have not, is lowered for GPUs alone.
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
        errors = process.stderr.strip().splitlines() or [f"it was ended by signal {-process.returncode}"]
        raise InputError(f"The step of {config.phase_key(phase)} cannot be compiled for {devices} "
                         f"devices: {errors[-1][:300]}")  # fmt: skip
    return {**json.loads(process.stdout), "seconds": round(time.monotonic() - start, 1)}


def _table(estimate: PhaseEstimate, proof: dict[str, Any], hardware: Hardware | None) -> str:
    memory, axes = estimate.memory, " × ".join(f"{name} {size}" for name, size in estimate.axes.items() if size > 1)
    of = f" of {hardware.memory / _GB:.0f}" if hardware else ""
    lines = [
        f"Phase {estimate.phase}: {axes or 'one device'}; {estimate.tokens:,} tokens a step, of which a device "
        f"works through {estimate.micro_batches} × {estimate.sequences} sequences; remat {estimate.remat}.",
        f"  {proof['proof']} in {proof['seconds']} s with {proof['host_bytes'] / _GB:.1f} GB of this machine",
        "  bytes of a device",
        *(f"    {name:<14}{size / _GB:10.2f} GB" for name, size in memory._asdict().items()),
        f"    {'peak':<14}{memory.total / _GB:10.2f} GB{of} = parameters + optimizer + frozen + max(update, others)",
        "  operations of a step on all devices",
        *(f"    {name:<14}{count / 1e12:12,.1f} TFLOP" for name, count in estimate.flops.items()),
        "  bytes that a device sends in a step, in rings" + ("" if estimate.transfers else ": none"),
        *(
            f"    {transfer.what}, {transfer.kind} over {', '.join(transfer.axes)}: {transfer.bytes / _GB:.3f} GB"
            for transfer in estimate.transfers
        ),
    ]
    if hardware is not None and estimate.step_seconds is not None and estimate.days is not None:
        bounds = ", ".join(f"{name} {value:.3f} s" for name, value in estimate.bounds.items())
        speed = estimate.tokens / estimate.step_seconds / math.prod(estimate.axes.values())
        lines.append(f"  a step takes at least: {bounds} (each alone; collectives one after another)")
        times = {**estimate.bounds, "compute": estimate.bounds["compute"] / REACHED}
        limit = max(times, key=lambda name: times[name])
        lines.append(f"  {estimate.step_seconds:.2f} s/step, limited by {limit} (compute counted at {REACHED:.0%} of "
                     f"the peak): {speed:,.0f} tokens/s per device, "
                     f"{estimate.days:.1f} days for the phase")  # fmt: skip
        if changes := advice(estimate, hardware):
            lines.append(f"  It does not fit. Try: {'; '.join(changes)}.")
        else:
            lines.append(f"  It fits, with {(hardware.memory - memory.total) / _GB:.1f} GB left.")
    return "\n".join(lines)
