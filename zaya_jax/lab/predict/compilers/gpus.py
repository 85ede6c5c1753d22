"""Descriptions of GPUs for XLA's compilers, from the vendors' documents.

NVIDIA: CUDA C++ Programming Guide (compute capability 9.0), and the data sheets of H100 SXM and H200. AMD: CDNA 3 and
CDNA 4 white papers, and the data sheets of Instinct MI300X and MI355X.
"""

from typing import NamedTuple

from zaya_jax.config.checks import require
from zaya_jax.hardware.data_sheets import HARDWARE
from zaya_jax.ops.target import Target

_KIB = 1024


class Gpu(NamedTuple):
    """A GPU as XLA's compilers describe it."""

    platform: str  # 'cuda' or 'rocm'
    architecture: str  # instruction set, as in `Target`
    kind: str  # the runtime's name for the device
    clock: float  # boost clock in GHz
    l2: int  # bytes of the L2 cache (of one die on AMD)
    shared: int  # bytes of shared memory (LDS) of a core
    shared_per_block: int  # bytes of it that one block can use
    registers: int  # 32-bit registers of a core

    @property
    def target(self) -> Target:
        """The device for which kernels are selected."""
        return Target(self.platform, self.kind, self.architecture)


_HOPPER = Gpu("cuda", "sm_90", "NVIDIA H200", 1.98, 50 * _KIB**2, 228 * _KIB, 227 * _KIB, 65536)

# The names are those of `hardware.data_sheets.HARDWARE`. jax's Triton lowering recognises AMD's kinds by 'gfx'.
GPUS = {
    "h100": _HOPPER._replace(kind="NVIDIA H100 80GB HBM3"),
    "h200": _HOPPER,
    "mi300x": Gpu("rocm", "gfx942", "gfx942", 2.1, 4 * _KIB**2, 64 * _KIB, 64 * _KIB, 131072),
    "mi355x": Gpu("rocm", "gfx950", "gfx950", 2.4, 4 * _KIB**2, 160 * _KIB, 160 * _KIB, 131072),
}


def check_gpu(name: str) -> None:
    """Raise `InputError` if there is no compiler for a GPU of this name."""
    require(name in GPUS, "--compile-for", name, f"one of {', '.join(GPUS)}")


def target_config(name: str) -> str:
    """Return the text of XLA's `GpuTargetConfigProto` for a GPU of `GPUS`."""
    gpu, sheet = GPUS[name], HARDWARE[name]
    if gpu.platform == "cuda":
        major, minor = gpu.architecture.removeprefix("sm_")
        capability = f"cuda_compute_capability {{ major: {major} minor: {minor} }}"
        versions = "dnn_version_info { major: 9 minor: 7 } runtime_version { major: 12 minor: 9 patch: 0 }"
    else:
        capability = f'rocm_compute_capability {{ gcn_arch_name: "{gpu.architecture}:sramecc+:xnack-" }}'
        versions = "dnn_version_info { }"
    cuda, warp = gpu.platform == "cuda", 32 if gpu.platform == "cuda" else 64
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_core_limit: 2048 threads_per_warp: {warp} fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  shared_memory_per_block: {48 * _KIB if cuda else gpu.shared_per_block}
  shared_memory_per_block_optin: {gpu.shared_per_block} shared_memory_per_core: {gpu.shared}
  registers_per_core_limit: {gpu.registers} registers_per_block_limit: {gpu.registers}
  core_count: {sheet.units} clock_rate_ghz: {gpu.clock} l2_cache_size: {gpu.l2}
  memory_bandwidth: {sheet.bandwidth:.0f} device_memory_size: {sheet.memory:.0f}
  {capability}
}}
platform_name: "{gpu.platform.upper()}"
{versions}
device_description_str: "{gpu.kind}"
"""
