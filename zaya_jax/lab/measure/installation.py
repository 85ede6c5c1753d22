"""Describe a machine, and check its installation: packages, processor, memory, disk, GPU, caches and extras."""

import os
import platform
import shutil
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, metadata, requires
from pathlib import Path
from typing import Any

import jax
import jaxlib.version
import psutil
from packaging.requirements import Requirement

from zaya_jax.checkpoint.environment import versions
from zaya_jax.hardware.detection import cpu_name, detect_gpu_plugin, read_file, select_preset
from zaya_jax.lab.measure.health_check import Check
from zaya_jax.lab.measure.network_devices import describe_network
from zaya_jax.ops.kernel_table import find_table
from zaya_jax.ops.registry import TUNE
from zaya_jax.ops.target import GPU_PLATFORMS, current_target
from zaya_jax.run.host_memory import free_memory
from zaya_jax.run.versions import package_version

_PROJECT, _CONSTRAINED = "zaya-jax", "-c constraints.txt"
_LITTLE = 2 * 10**9  # bytes of memory, or of a disk, below which `configs/tiny.yaml` may not train
# By extra: the name of its driver, and the file with the driver's version.
DRIVERS = {"rocm": ("amdgpu", "sys/module/amdgpu/version"), "cuda": ("nvidia", "proc/driver/nvidia/version")}
# Variables that affect compilers, runtimes and collectives, and that contain nothing personal.
_PREFIXES = ("XLA_", "NCCL_", "RCCL_", "HSA_", "HIP_", "ROCR_", "CUDA_VISIBLE", "JAX_PLATFORMS", "JAX_NUM_CPU")


def check_installation(root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> list[Check]:
    """Return the checks, what is wrong first; the files of the system are below `root`."""
    checks = [_packages(), *_host(), *_devices(root, environment), _cache(environment), _extras()]
    return sorted(checks, key=lambda check: ("FAIL", "WARN", "PASS").index(check.status))


def unused_gpu(platform_used: str, root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> str | None:
    """Return a sentence if the machine has a GPU, but jax uses only the CPU, without being told to; else None."""
    plugin = detect_gpu_plugin(root)
    if plugin is None or platform_used != "cpu" or environment.get("JAX_PLATFORMS", "").startswith("cpu"):
        return None
    advice = f"Install the plugin with pip install -e '.[{plugin}]' {_CONSTRAINED}; JAX's own message is above."
    return f"This machine has a GPU, but JAX found only the CPU. {advice}"


def describe_machine() -> dict[str, Any]:
    """Describe this machine, for JSON, memory in bytes; `failed`: a sentence, if JAX does not use its GPU."""
    device, target = jax.devices()[0], current_target()
    drivers = {name: read_file(Path("/", file)).splitlines() for name, file in DRIVERS.values()}
    machine: dict[str, Any] = {"platform": target.platform, "device": target.device_kind}
    machine |= {"devices": jax.device_count(), "runtime": device.client.platform_version}
    machine["device_bytes"] = (device.memory_stats() or {}).get("bytes_limit")
    machine |= {"host_bytes": psutil.virtual_memory().total, "kernel": platform.release()}
    machine["versions"] = {**versions(), "jax": jax.__version__, "jaxlib": jaxlib.version.__version__}
    machine["drivers"] = {name: lines[0] for name, lines in drivers.items() if lines}
    variables = {name: value for name, value in sorted(os.environ.items()) if name.startswith(_PREFIXES)}
    machine |= {"network": describe_network(), "environment": variables, "preset": select_preset(None).name}
    if problem := unused_gpu(target.platform):
        machine["failed"] = problem
    return machine


def _row(name: str, message: str, problem: str | None = None, *, is_fatal: bool = False) -> Check:
    """Return a check that passes with a message, or fails or warns with a problem."""
    status = "PASS" if problem is None else "FAIL" if is_fatal else "WARN"
    return Check(name, status, None, "", problem or message)


def _packages() -> Check:
    names = (_PROJECT, "jax", "jaxlib", "flax")
    versions = ", ".join(f"{name} {package_version(name) or 'without metadata'}" for name in names)
    missing = _unsatisfied(_requirements(_PROJECT))
    advice = f"Install them with pip install -e . {_CONSTRAINED}."
    problem = f"Not installed in a version that is supported: {', '.join(missing)}. {advice}" if missing else None
    return _row("packages", f"Python {platform.python_version()}, {versions}", problem, is_fatal=True)


def _requirements(project: str, extra: str = "") -> list[Requirement]:
    """Return what a package, or one of its extras alone, needs on this Python; [] without its metadata."""

    def applies(requirement: Requirement, name: str) -> bool:
        return requirement.marker is None or requirement.marker.evaluate({"extra": name})

    try:
        every = [Requirement(text) for text in requires(project) or ()]
    except PackageNotFoundError:
        return []
    own = [each for each in every if applies(each, extra) and not (extra and applies(each, ""))]
    return own + [part for each in own for name in each.extras for part in _requirements(each.name, name)]


def _unsatisfied(needed: Sequence[Requirement]) -> list[str]:
    """Return those of the packages that are not installed in a version that is allowed."""
    versions = {each.name: package_version(each.name) for each in needed}
    wrong = (each for each in needed if not (found := versions[each.name]) or found not in each.specifier)
    return [f"{each.name}{each.specifier} ({versions[each.name] or 'not installed'})" for each in wrong]


def _host() -> Iterator[Check]:
    usable, every, total = len(os.sched_getaffinity(0)), os.cpu_count() or 1, psutil.virtual_memory().total
    yield _row("processor", f"{cpu_name()}, {usable} of {every} cores")
    free, need = free_memory(), f"training configs/tiny.yaml needs {_LITTLE / 1e9:.0f} GB"
    problem = f"Only {free / 1e9:.3g} GB are free: {need}." if free < _LITTLE else None
    yield _row("memory of the host", f"{free / 1e9:.3g} of {total / 1e9:.3g} GB free", problem)
    folder, free = Path.cwd(), shutil.disk_usage(".").free
    found = f"{free / 1e9:.3g} GB free in {folder}"
    problem = f"Only {found}: checkpoints will fill it. Set run_dir to another disk." if free < _LITTLE else None
    yield _row("disk", found, problem)


def _devices(root: Path, environment: Mapping[str, str]) -> Iterator[Check]:
    plugin = detect_gpu_plugin(root)
    driver = plugin and (read_file(root / DRIVERS[plugin][1]).splitlines() or ["of unknown version"])[0]
    try:
        device, target = jax.local_devices()[0], current_target()
    except RuntimeError as error:
        yield _row("devices", "", f"JAX cannot use its devices: {str(error).splitlines()[0]}", is_fatal=True)
        return
    found = f"{jax.device_count()} × {target.device_kind}, preset {select_preset(None, root, environment).name}"
    memory = (device.memory_stats() or {}).get("bytes_limit")
    found += f", {memory / 1e9:.3g} GB each" if memory else ""
    found += f", driver {driver}" if driver else ", no GPU"
    yield _row("devices", found, unused_gpu(target.platform, root, environment), is_fatal=True)
    if target.platform in GPU_PLATFORMS:
        table = find_table(target, lambda _: None)
        problem = f"No kernels were measured on {target.device_kind}: the default ones run. To measure: {TUNE} CONFIG"
        yield _row("kernels", f"measured: {table.source}" if table else "", None if table else problem)


def _cache(environment: Mapping[str, str]) -> Check:
    folder = environment.get("JAX_COMPILATION_CACHE_DIR")
    if not folder:
        remedy = "Set JAX_COMPILATION_CACHE_DIR to a folder."
        return _row("compilation cache", "", f"Compiled programs are not kept, so every start compiles again. {remedy}")
    files = [path for path in Path(folder).glob("*") if path.is_file()]
    return _row("compilation cache", f"{sum(path.stat().st_size for path in files) / 1e6:,.0f} MB in {folder}")


def _extras() -> Check:
    try:
        extras = metadata(_PROJECT).get_all("Provides-Extra") or []
    except PackageNotFoundError:
        return _row("extras", "", f"Unknown without the project's metadata: pip install -e . {_CONSTRAINED}")
    packages = {name: needed for name in extras if (needed := _requirements(_PROJECT, name))}  # on this Python
    installed = [name for name, needed in packages.items() if not _unsatisfied(needed)]
    missing = [name for name in packages if name not in installed]
    return _row("extras", f"installed: {', '.join(installed) or 'none'}; not installed: {', '.join(missing) or 'none'}")
