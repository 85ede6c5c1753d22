"""Presets: XLA flags, environment variables and timeouts for each kind of machine.

`environment.apply_preset` sets them. Network interfaces depend on the cluster, so presets do not set them.
"""

from typing import Literal, NamedTuple

PresetName = Literal["cpu", "mi300x", "mi355x", "h100", "h200"]

_PRIMUS = "https://github.com/AMD-AGI/Primus/blob/main/primus/backends/maxtext/env_spec.py"
_TOOLBOX = "https://github.com/NVIDIA/JAX-Toolbox/blob/main/docs/GPU_performance.md"
_XLA = "https://github.com/openxla/xla/blob/main/xla/debug_options_flags.cc"
_NCCL = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"
_MI300X = "https://rocm.docs.amd.com/en/latest/how-to/rocm-for-ai/inference-optimization/workload.html"
_RCCL = "https://rocm.blogs.amd.com/software-tools-optimization/mi300x-rccl-xgmi/README.html"
_ROCR = "https://rocm.docs.amd.com/projects/ROCR-Runtime/en/latest/api-reference/environment_variables.html"


class Setting(NamedTuple):
    """An XLA flag (its name starts with `--`) or an environment variable."""

    name: str  # of the flag or variable
    value: str  # as text; may be empty
    why: str  # the reason, in one line
    source: str  # URL that recommends the value or describes the effect
    alias: str | None = None  # second name of the variable; only one of the two may be set

    @property
    def text(self) -> str:
        """NAME=VALUE."""
        return f"{self.name}={self.value}"

    @property
    def is_flag(self) -> bool:
        """True if it belongs in `XLA_FLAGS`."""
        return self.name.startswith("--")


class Preset(NamedTuple):
    """The settings of one kind of machine."""

    name: str  # value of the configuration key `preset`; the same as the name of the accelerator's data sheet
    settings: tuple[Setting, ...]  # flags and variables
    join_seconds: int  # maximum time to wait for the coordinator when a job starts
    peer_timeout: int  # seconds without a heartbeat of another process after which the run stops
    # further flags for the programs of steps that gather their layers over `parallel.fsdp`
    fsdp: tuple[Setting, ...] = ()
    # likewise for steps of one micro-batch, whose layers gather their experts
    one_micro_batch: tuple[Setting, ...] = ()


def _memory(fraction: str, source: str) -> Setting:
    return Setting("XLA_PYTHON_CLIENT_MEM_FRACTION", fraction, "fraction of GPU memory that XLA preallocates (default: "
                   "0.75)", source, "XLA_CLIENT_MEM_FRACTION")  # fmt: skip


# Of a step, with `train.deterministic`.
DETERMINISTIC = Setting("--xla_gpu_exclude_nondeterministic_ops", "true",
                        "no operation whose result may vary, and no choice by time", _XLA)  # fmt: skip
# Of a program that is traced. A step takes as long without graphs (6.04 and 6.03 s on an H200).
TRACED = Setting("--xla_gpu_enable_command_buffer", "", "graphs would hide the instructions from a trace", _XLA)

_SATURATED = "134217728"  # bytes of a message that saturates the links of a node
_COLLECTIVES = (
    Setting("--xla_gpu_experimental_parallel_collective_overlap_limit", "4",
            "a layer's gathers and the reduction of the layer before may run at the same time", _XLA),
    Setting("--xla_gpu_all_gather_combine_threshold_bytes", _SATURATED,
            "combines small all-gathers up to 128 MiB, where links are saturated; larger messages start later", _RCCL),
    Setting("--xla_gpu_reduce_scatter_combine_threshold_bytes", _SATURATED,
            "combines the reduce-scatters of gradients likewise", _RCCL),
    Setting("--xla_gpu_first_collective_call_terminate_timeout_seconds", "300",
            "the first collective waits up to 300 s for the slowest GPU; XLA's default is 40 s", _XLA),
    Setting("NCCL_IB_TIMEOUT", "22", "InfiniBand and RoCE retry for 120 s instead of 30 s, so a flapping link "
            "does not end the run; RCCL reads it too", _NCCL),
)  # fmt: skip
# Not for all programs: with context parallelism, gathers would be taken out of the loop over micro-batches.
_PIPELINED = Setting("--xla_gpu_enable_pipelined_all_gather", "true", "gathers the next layer while one is computed",
                     _TOOLBOX)  # fmt: skip
# Only where the layers gather: with `gradient_reduction: micro_batch`, the step would take longer.
_ANALYTICAL = Setting("--xla_gpu_enable_analytical_latency_estimator", "true",
                      "estimates how long a gather takes, and starts it early enough", _XLA)  # fmt: skip
_DOUBLED = Setting("--xla_gpu_enable_while_loop_double_buffering", "true",
                   "an iteration of the loop computes two layers, so gathered ones need no copy", _XLA)  # fmt: skip
_AMD = (
    *_COLLECTIVES,
    Setting("--xla_gpu_enable_latency_hiding_scheduler", "true",
            "overlaps collectives with independent computation; on NVIDIA GPUs XLA does so by default", _TOOLBOX),
    Setting("--xla_gpu_enable_all_gather_combine_by_dim", "false",
            "also combines all-gathers of arrays that are sharded along different axes", _PRIMUS),
    Setting("--xla_gpu_enable_cublaslt", "true", "uses hipBLASLt for matmuls", _PRIMUS),
    Setting("--xla_gpu_enable_command_buffer", "",
            "disables graph capture, as AMD's own training runs do", _PRIMUS),
    _memory("0.97", _PRIMUS),
    Setting("GPU_MAX_HW_QUEUES", "2", "one queue for computation and one for collectives; HIP's default is up to 4",
            _PRIMUS),
    Setting("HIP_FORCE_DEV_KERNARG", "1",
            "keeps kernel arguments in GPU memory, which shortens kernel launches", _MI300X),
)  # fmt: skip
_HOPPER = (
    *_COLLECTIVES,
    _memory("0.9", _TOOLBOX),
    Setting("CUDA_DEVICE_MAX_CONNECTIONS", "1",
            "one queue, so kernels start in the order XLA scheduled; only for Hopper", _TOOLBOX),
)  # fmt: skip

# Machines of a job pull containers and start at different times. The peer timeout exceeds the network's 2 minutes of
# retries, so network errors are reported first.
_CLUSTER = 600, 180  # `join_seconds` and `peer_timeout`

HEARTBEAT_MARGIN = 30  # seconds that jax's heartbeat timeout exceeds the peer timeout

PRESETS = {
    preset.name: preset
    for preset in (
        Preset("cpu", (), join_seconds=120, peer_timeout=60),
        Preset("mi300x", (*_AMD, Setting("HSA_NO_SCRATCH_RECLAIM", "1", "keeps scratch memory allocated instead of "
               "reallocating it for each large kernel", _ROCR)), *_CLUSTER, fsdp=(_PIPELINED, _ANALYTICAL),
               one_micro_batch=(_ANALYTICAL,)),
        Preset("mi355x", (*_AMD, Setting("RCCL_WARP_SPEED_AUTO", "0", "RCCL's WarpSpeed, on by default, can cause "
               "NaN losses", _PRIMUS)), *_CLUSTER, fsdp=(_PIPELINED, _ANALYTICAL),
               one_micro_batch=(_ANALYTICAL,)),
        Preset("h100", _HOPPER, *_CLUSTER, fsdp=(_PIPELINED, _DOUBLED), one_micro_batch=(_PIPELINED,)),
        Preset("h200", _HOPPER, *_CLUSTER, fsdp=(_PIPELINED, _DOUBLED), one_micro_batch=(_PIPELINED,)),
    )
}  # fmt: skip
