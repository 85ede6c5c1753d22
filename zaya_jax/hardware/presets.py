"""Presets: XLA flags, environment variables and timeouts for each kind of machine, as data.

`environment.apply_preset` sets them. Network interfaces belong to a cluster and are in no preset.
"""

from typing import Literal, NamedTuple

PresetName = Literal["cpu", "mi300x", "mi355x", "h100", "h200"]

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
    """The settings of one kind of machine.

    Attributes:
      name: as in the configuration key `preset`; accelerators have the names of their data sheets.
      settings: flags and variables.
      join_seconds: how long a process waits for the coordinator when a job starts.
      peer_timeout: seconds without a sign of another process after which the run stops.
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
