"""Presets: what XLA and the libraries below it are told on each kind of machine, before jax is imported.

A preset is a few XLA flags, a few environment variables and two timeouts. What a person has set stands: a variable that
is there is left, and so is a flag that `XLA_FLAGS` names. Network interfaces are a cluster's own and in no preset.
"""

import os
import re
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from zaya_jax.config.schema import Config

PresetName = Literal["cpu", "mi300x", "mi355x", "h100", "h200"]

APPLIED = "ZAYA_PRESET"  # holds the name of the preset that was applied to this environment

_PRIMUS = "https://github.com/AMD-AGI/Primus/blob/main/primus/backends/maxtext/env_spec.py"
_TOOLBOX = "https://github.com/NVIDIA/JAX-Toolbox/blob/main/docs/GPU_performance.md"
_XLA = "https://github.com/openxla/xla/blob/main/xla/debug_options_flags.cc"
_NCCL = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"
_MI300X = "https://rocm.docs.amd.com/en/latest/how-to/rocm-for-ai/inference-optimization/workload.html"
_ROCR = "https://rocm.docs.amd.com/projects/ROCR-Runtime/en/latest/api-reference/environment_variables.html"


class Setting(NamedTuple):
    """An XLA flag (its name begins with `--`) or an environment variable.

    Attributes:
      name: of the flag or the variable.
      value: as text; may be empty.
      why: the reason, in a line.
      source: the address of who gives the value or describes the effect.
      alias: a second name that the variable goes by; only one of the two may be set.
    """

    name: str
    value: str
    why: str
    source: str
    alias: str | None = None

    @property
    def text(self) -> str:
        """NAME=VALUE."""
        return f"{self.name}={self.value}"

    @property
    def is_flag(self) -> bool:
        """Whether it stands in `XLA_FLAGS`."""
        return self.name.startswith("--")


class Preset(NamedTuple):
    """What one kind of machine is told.

    Attributes:
      name: as the configuration's `preset` has it.
      settings: flags and variables.
      join_seconds: how long a process waits for the coordinator when a job begins.
      peer_timeout: how long a process may go unheard before the run stops.
    """

    name: str
    settings: tuple[Setting, ...]
    join_seconds: int
    peer_timeout: int


def _memory(fraction: str, source: str) -> Setting:
    return Setting("XLA_PYTHON_CLIENT_MEM_FRACTION", fraction, "the part of a GPU's memory that XLA takes; without it "
                   "three quarters", source, "XLA_CLIENT_MEM_FRACTION")  # fmt: skip


_COLLECTIVES = (
    Setting("--xla_gpu_enable_latency_hiding_scheduler", "true",
            "collectives run beside the arithmetic that does not wait for them", _TOOLBOX),
    Setting("--xla_gpu_all_gather_combine_threshold_bytes", "8589934592",
            "the gathers of a layer become one; larger messages use a link better", _TOOLBOX),
    Setting("--xla_gpu_reduce_scatter_combine_threshold_bytes", "8589934592",
            "the same of the gradients' reduce-scatters", _TOOLBOX),
    Setting("--xla_gpu_first_collective_call_terminate_timeout_seconds", "300",
            "the first collective waits for the GPU that is ready last; XLA alone ends the process after 40 s", _XLA),
    Setting("NCCL_IB_TIMEOUT", "22", "InfiniBand and RoCE retry for 2 minutes, not 30 s, so that a link that comes "
            "back costs time and not the run; RCCL reads it too", _NCCL),
)  # fmt: skip
_AMD = (
    *_COLLECTIVES,
    Setting("--xla_gpu_enable_all_gather_combine_by_dim", "false",
            "gathers of arrays that are split along different axes are combined too", _PRIMUS),
    Setting("--xla_gpu_enable_cublaslt", "true", "matrix products go to hipBLASLt", _PRIMUS),
    Setting("--xla_gpu_enable_command_buffer", "",
            "no graph capture, which AMD's own training runs turn off", _PRIMUS),
    _memory("0.97", _PRIMUS),
    Setting("GPU_MAX_HW_QUEUES", "2", "a queue for arithmetic and one for collectives; HIP makes up to 4", _PRIMUS),
    Setting("HIP_FORCE_DEV_KERNARG", "1",
            "arguments of kernels lie in the GPU's memory, so that a kernel begins sooner", _MI300X),
)  # fmt: skip
_HOPPER = (
    *_COLLECTIVES,
    _memory("0.9", _TOOLBOX),
    Setting("CUDA_DEVICE_MAX_CONNECTIONS", "1",
            "one queue, so that work starts in the order XLA has planned; for Hopper alone", _TOOLBOX),
)  # fmt: skip

# A job's machines fetch containers and start at different times. Silence is longer than the network's own 2 minutes of
# retries, which then have the first word.
_CLUSTER = {"join_seconds": 600, "peer_timeout": 180}

PRESETS = {
    preset.name: preset
    for preset in (
        Preset("cpu", (), join_seconds=120, peer_timeout=60),
        Preset("mi300x", (*_AMD, Setting("HSA_NO_SCRATCH_RECLAIM", "1", "scratch memory stays with its queue and is "
               "not handed out anew for each large kernel", _ROCR)), **_CLUSTER),
        Preset("mi355x", (*_AMD, Setting("RCCL_WARP_SPEED_AUTO", "0", "RCCL's WarpSpeed, which is on by itself, can "
               "make losses NaN", _PRIMUS)), **_CLUSTER),
        Preset("h100", _HOPPER, **_CLUSTER),
        Preset("h200", _HOPPER, **_CLUSTER),
    )
}  # fmt: skip

# gfx942 (also MI325X, of the same architecture) and gfx950, as the kernel writes them.
_GFX_TARGETS = {"90402": "mi300x", "90500": "mi355x"}
_MODELS = {"H100": "h100", "H200": "h200"}


def preset_of(config: "Config", root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> Preset:
    """The preset that `config` names; where it names none, that of the first GPU found, `cpu` without one.

    Args:
      config: a run's configuration.
      root: where `/sys`, `/proc` and `/dev` are.
      environment: in which `JAX_PLATFORMS` may keep jax on the CPU.
    """
    if config.preset is not None:
        return PRESETS[config.preset]
    if environment.get("JAX_PLATFORMS", "").startswith("cpu"):
        return PRESETS["cpu"]
    return PRESETS[next((name for name in (*_amd_gpus(root), *_nvidia_gpus(root)) if name), "cpu")]


def _amd_gpus(root: Path) -> list[str | None]:
    if not (root / "dev" / "kfd").exists():  # a container sees the machine's topology even where it has no GPU
        return []
    files = sorted(root.glob("sys/class/kfd/kfd/topology/nodes/*/properties"))
    targets = [re.search(r"^gfx_target_version (\d+)$", _read(file), re.MULTILINE) for file in files]
    return [_GFX_TARGETS.get(target[1]) for target in targets if target]


def _nvidia_gpus(root: Path) -> list[str | None]:
    files = sorted(root.glob("proc/driver/nvidia/gpus/*/information"))
    models = [re.search(r"^Model:.*\b(H100|H200)\b", _read(file), re.MULTILINE) for file in files]
    return [_MODELS[model[1]] for model in models if model]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:  # of a GPU that this process may not see
        return ""


def apply_preset(preset: Preset, environment: MutableMapping[str, str] = os.environ) -> None:
    """Set in `environment` what `preset` says and a person has not; to be called before jax is imported."""
    flags = environment.get("XLA_FLAGS", "").strip()
    takes_flags = flags == "" or flags.startswith("-")  # anything else is a file that XLA reads its flags from
    for setting in preset.settings:
        if _standing(setting, environment) is not None:
            continue
        if not setting.is_flag:
            environment[setting.name] = setting.value
        elif takes_flags:
            flags = f"{flags} {setting.text}".strip()
            environment["XLA_FLAGS"] = flags
    environment[APPLIED] = preset.name


def describe_preset(environment: Mapping[str, str] = os.environ) -> str | None:
    """A line on the preset that was applied to `environment` and what of it stands there; None where none was."""
    preset = PRESETS.get(environment.get(APPLIED, ""))
    if preset is None:
        return None
    standing = [(setting, _standing(setting, environment)) for setting in preset.settings]
    ours = [setting.text for setting, found in standing if found == setting.text]
    yours = [found for setting, found in standing if found not in (None, setting.text)]
    missing = [setting.name for setting, found in standing if found is None]
    line = f"Preset {preset.name}: {' '.join(ours) or 'nothing set'}"
    line += f"; set before: {' '.join(map(str, yours))}" if yours else ""
    return line + (f"; not set: {' '.join(missing)}" if missing else "")


def _standing(setting: Setting, environment: Mapping[str, str]) -> str | None:
    """NAME=VALUE of the flag or variable as `environment` has it; None where it is not there."""
    if setting.is_flag:
        # A flag without a value is true; where it is given twice, XLA takes the last.
        found = re.findall(rf"(?:^|\s)({setting.name}(?:=\S*)?)(?=\s|$)", environment.get("XLA_FLAGS", ""))
        return found[-1] if found else None
    names = [name for name in (setting.name, setting.alias) if name is not None and name in environment]
    return f"{names[0]}={environment[names[0]]}" if names else None
