"""Presets: XLA flags, environment variables and timeouts for each kind of machine.

`environment.apply_preset` sets them. Network interfaces depend on the cluster, so presets do not set them.
"""

from typing import Literal, NamedTuple

from zaya_jax.hardware.data_sheets import HARDWARE

PresetName = Literal["cpu", "mi300x", "mi355x", "h100", "h200"]

_PRIMUS = "https://github.com/AMD-AGI/Primus/blob/main/primus/backends/maxtext/env_spec.py"
_TOOLBOX = "https://github.com/NVIDIA/JAX-Toolbox/blob/main/docs/GPU_performance.md"
_XLA = "https://github.com/openxla/xla/blob/main/xla/debug_options_flags.cc"
_NCCL = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"
_MI300X = "https://rocm.docs.amd.com/en/latest/how-to/rocm-for-ai/inference-optimization/workload.html"
_RCCL = "https://rocm.blogs.amd.com/software-tools-optimization/mi300x-rccl-xgmi/README.html"
_ROCR = "https://rocm.docs.amd.com/projects/ROCR-Runtime/en/latest/api-reference/environment_variables.html"


# Second names of variables; only one of the two may be set.
_ALIASES = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "XLA_CLIENT_MEM_FRACTION"}


class Setting(NamedTuple):
    """An XLA flag (its name starts with `--`) or an environment variable."""

    name: str  # of the flag or variable
    value: str  # as text; may be empty
    reason: str  # the reason, in one line
    source: str  # URL that recommends the value or describes the effect

    @property
    def text(self) -> str:
        """NAME=VALUE."""
        return f"{self.name}={self.value}"

    @property
    def is_flag(self) -> bool:
        """True if it belongs in `XLA_FLAGS`."""
        return self.name.startswith("--")

    @property
    def alias(self) -> str | None:
        """Second name of the variable, if it has one."""
        return _ALIASES.get(self.name)


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


def _settings(source: str, *texts: str) -> tuple[Setting, ...]:
    """Make settings from a source: NAME=VALUE and the reason of each, one after the other."""
    parts = ((text.partition("="), reason) for text, reason in zip(texts[::2], texts[1::2], strict=True))
    return tuple(Setting(name, value, reason, source) for (name, _, value), reason in parts)


# Of a step, with `train.deterministic`; and of a program that is traced. A step takes as long without graphs (6.04 and
# 6.03 s on an H200).
DETERMINISTIC, TRACED = _settings(
    _XLA,
    "--xla_gpu_exclude_nondeterministic_ops=true",
    "no operation whose result may vary, and no choice by time",
    "--xla_gpu_enable_command_buffer=",
    "graphs would hide the instructions from a trace",
)
_COLLECTIVES = (
    *_settings(
        _XLA,
        "--xla_gpu_experimental_parallel_collective_overlap_limit=4",
        "a layer's gathers and the reduction of the layer before may run at the same time",
        "--xla_gpu_first_collective_call_terminate_timeout_seconds=300",
        "the first collective waits up to 300 s for the slowest GPU; XLA's default is 40 s",
    ),
    *_settings(
        _RCCL,
        "--xla_gpu_all_gather_combine_threshold_bytes=134217728",
        "combines small all-gathers up to 128 MiB, where links are saturated; larger messages start later",
        "--xla_gpu_reduce_scatter_combine_threshold_bytes=134217728",
        "combines the reduce-scatters of gradients likewise",
    ),
    *_settings(
        _NCCL,
        "NCCL_IB_TIMEOUT=22",
        "InfiniBand and RoCE retry for 120 s instead of 30 s, so a flapping link does not end the run; RCCL reads it "
        "too",
    ),
)
# Not for all programs: with context parallelism, pipelined gathers would be taken out of the loop over micro-batches.
_PIPELINED, *_ = _settings(
    _TOOLBOX, "--xla_gpu_enable_pipelined_all_gather=true", "gathers the next layer while one is computed"
)
_DOUBLED, *_ = _settings(
    _XLA,
    "--xla_gpu_enable_while_loop_double_buffering=true",
    "an iteration of the loop computes two layers, so gathered ones need no copy",
)
_AMD = (
    *_settings(
        _TOOLBOX,
        "--xla_gpu_enable_latency_hiding_scheduler=true",
        "overlaps collectives with independent computation; on NVIDIA GPUs XLA does so by default",
    ),
    *_settings(
        _PRIMUS,
        "--xla_gpu_enable_all_gather_combine_by_dim=false",
        "also combines all-gathers of arrays that are sharded along different axes",
        "--xla_gpu_enable_cublaslt=true",
        "uses hipBLASLt for matmuls",
        "--xla_gpu_enable_command_buffer=",
        "disables graph capture, as AMD's own training runs do",
        "GPU_MAX_HW_QUEUES=2",
        "one queue for computation and one for collectives; HIP's default is up to 4",
    ),
    *_settings(
        _MI300X, "HIP_FORCE_DEV_KERNARG=1", "keeps kernel arguments in GPU memory, which shortens kernel launches"
    ),
)
_QUEUE = "one queue, so kernels start in the order XLA scheduled; only for Hopper"
_HOPPER = _settings(_TOOLBOX, "CUDA_DEVICE_MAX_CONNECTIONS=1", _QUEUE)
_SCRATCH = "keeps scratch memory allocated instead of reallocating it for each large kernel"
_WARPS = "RCCL's WarpSpeed, on by default, can cause NaN losses"
_OWN = {
    "mi300x": _settings(_ROCR, "HSA_NO_SCRATCH_RECLAIM=1", _SCRATCH),
    "mi355x": _settings(_PRIMUS, "RCCL_WARP_SPEED_AUTO=0", _WARPS),
}
_FRACTION = "fraction of GPU memory that XLA preallocates (default: 0.75)"

HEARTBEAT_MARGIN = 30  # seconds that jax's heartbeat timeout exceeds the peer timeout


def _gpu(name: str) -> Preset:
    """Make the preset of a GPU from its data sheet, its vendor's settings and its own."""
    hopper, memory = HARDWARE[name].switched, f"XLA_PYTHON_CLIENT_MEM_FRACTION={HARDWARE[name].memory_fraction:g}"
    vendor = (*(_HOPPER if hopper else _AMD), *_settings(_TOOLBOX if hopper else _PRIMUS, memory, _FRACTION))
    fsdp, one_micro_batch = ((_PIPELINED, _DOUBLED), (_PIPELINED,)) if hopper else ((_PIPELINED,), ())
    # Machines of a job pull containers and start at different times. The peer timeout exceeds the network's 2 minutes
    # of retries, so network errors are reported first.
    return Preset(name, (*_COLLECTIVES, *vendor, *_OWN.get(name, ())), 600, 180, fsdp, one_micro_batch)


PRESETS = {"cpu": Preset("cpu", (), join_seconds=120, peer_timeout=60), **{name: _gpu(name) for name in HARDWARE}}
