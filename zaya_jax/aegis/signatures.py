"""Signatures of faults in logs: lines of the Linux kernel, of RCCL, NCCL, Gloo and XLA, and of zaya_jax itself."""

import dataclasses
import re
from typing import Literal

from zaya_jax.aegis.observation import FaultClass, Observation, Severity

Source = Literal["trainer", "kernel"]
SKIPPED = "too-many-skipped-steps"  # code of a trainer that stopped itself
_LONGEST_LINE = 2048  # bytes that are looked at


@dataclasses.dataclass(frozen=True)
class Signature:
    """A kind of line that tells of a fault.

    Attributes:
      code: name of the fault.
      fault: its class.
      severity: how bad it is.
      source: which log has such lines.
      word: literal text that every such line contains; looked for first, since that is fast.
      pattern: regular expression of the line.
      sample: such a line.
      origin: what writes it.
    """

    code: str
    fault: FaultClass
    severity: Severity
    source: Source
    word: bytes
    pattern: re.Pattern[bytes]
    sample: str
    origin: str


def _kernel(
    code: str, fault: FaultClass, severity: Severity, word: str, pattern: str, sample: str, origin: str
) -> Signature:
    return Signature(code, fault, severity, "kernel", word.encode(), re.compile(pattern.encode()), sample, origin)


def _trainer(
    code: str, fault: FaultClass, severity: Severity, word: str, pattern: str, sample: str, origin: str
) -> Signature:
    return Signature(code, fault, severity, "trainer", word.encode(), re.compile(pattern.encode()), sample, origin)


_F, _INFO, _WARNING, _ERROR, _FATAL = FaultClass, Severity.INFO, Severity.WARNING, Severity.ERROR, Severity.FATAL
_RAS = "Linux: drivers/gpu/drm/amd/amdgpu/amdgpu_ras.c"
_AMDGPU = "Linux: drivers/gpu/drm/amd/amdgpu"
_XID = "NVIDIA: Xid errors"

SIGNATURES = (
    _kernel(
        "gpu-uncorrectable-ecc",
        _F.GPU,
        _ERROR,
        "uncorrectable hardware error",
        r"\buncorrectable hardware errors? detected in",
        "amdgpu 0000:c1:00.0: amdgpu: socket: 0, die: 0 1 new uncorrectable hardware errors detected in umc block",
        _RAS,
    ),
    _kernel(
        "gpu-correctable-ecc",
        _F.GPU,
        _WARNING,
        "correctable hardware error",
        r"[^n]correctable hardware errors? detected in",
        "amdgpu 0000:c1:00.0: amdgpu: socket: 0, die: 0 3 new correctable hardware errors detected in umc block",
        _RAS,
    ),
    _kernel(
        "gpu-poison",
        _F.GPU,
        _ERROR,
        "oison",
        r"amdgpu.*(RAS poison|poison is (consumed|created))",
        "amdgpu 0000:c1:00.0: amdgpu: RAS poison consumption, unmap queue flow succeeded",
        _RAS,
    ),
    _kernel(
        "gpu-reset",
        _F.GPU,
        _ERROR,
        "GPU reset",
        r"GPU reset begin",
        "amdgpu 0000:c1:00.0: amdgpu: GPU reset begin!",
        _AMDGPU + "/amdgpu_device.c",
    ),
    _kernel(
        "gpu-reset-failed",
        _F.GPU,
        _FATAL,
        "GPU reset",
        r"GPU reset(\(\d+\) failed| end with ret = -)",
        "amdgpu 0000:c1:00.0: amdgpu: GPU reset end with ret = -62",
        _AMDGPU + "/amdgpu_device.c",
    ),
    _kernel(
        "gpu-ring-timeout",
        _F.GPU,
        _ERROR,
        "timeout",
        r"ring \S+ timeout",
        "[drm:amdgpu_job_timedout [amdgpu]] *ERROR* ring sdma0 timeout, signaled seq=12, emitted seq=14",
        _AMDGPU + "/amdgpu_job.c",
    ),
    _kernel(
        "gpu-page-fault",
        _F.GPU,
        _WARNING,
        "page fault",
        r"amdgpu.*page fault \(src_id",
        "amdgpu 0000:c1:00.0: amdgpu: [gfxhub0] no-retry page fault (src_id:0 ring:24 vmid:3 pasid:32770)",
        _AMDGPU + "/gmc_v9_0.c",
    ),
    _kernel(
        "gpu-lost",
        _F.GPU,
        _FATAL,
        "lost",
        r"amdgpu.*device lost from bus",
        "amdgpu 0000:c1:00.0: amdgpu: device lost from bus!",
        _AMDGPU + "/amdgpu_device.c",
    ),
    _kernel(
        "gpu-lost",
        _F.GPU,
        _FATAL,
        "Xid",
        r"NVRM: Xid \([^)]{1,60}\): 79,",
        "NVRM: Xid (PCI:0000:65:00): 79, pid=4242, name=python, GPU has fallen off the bus.",
        _XID,
    ),
    _kernel(
        "gpu-uncorrectable-ecc",
        _F.GPU,
        _ERROR,
        "Xid",
        r"NVRM: Xid \([^)]{1,60}\): (48|95|64),",
        "NVRM: Xid (PCI:0000:65:00): 48, pid=4242, name=python, DBE (double bit error) ECC",
        _XID,
    ),
    _kernel(
        "gpu-contained-ecc",
        _F.GPU,
        _WARNING,
        "Xid",
        r"NVRM: Xid \([^)]{1,60}\): (63|94),",
        "NVRM: Xid (PCI:0000:65:00): 94, pid=4242, name=python, Contained: SM (0x1).",
        _XID,
    ),
    _kernel(
        "gpu-nvlink",
        _F.GPU,
        _ERROR,
        "Xid",
        r"NVRM: Xid \([^)]{1,60}\): 74,",
        "NVRM: Xid (PCI:0000:65:00): 74, pid=4242, NVLink: fatal error detected on link 2",
        _XID,
    ),
    _kernel(
        "pcie-error",
        _F.GPU,
        _WARNING,
        "AER:",
        r"AER: (Uncorrect\w+|Multiple Uncorrect\w+)",
        "pcieport 0000:c0:01.1: AER: Uncorrected (Fatal) error received: 0000:c1:00.0",
        "Linux: drivers/pci/pcie/aer.c",
    ),
    _kernel(
        "link-down",
        _F.NETWORK,
        _WARNING,
        "ink ",
        r"(ionic|mlx5_core|bnxt_en|ice)\b.*\b(NIC )?Link (is )?[Dd]own",
        "mlx5_core 0000:08:00.0 ens1np0: Link down",
        "Linux: drivers/net/ethernet",
    ),
    _kernel(
        "link-up",
        _F.NETWORK,
        _INFO,
        "ink ",
        r"(ionic|mlx5_core|bnxt_en|ice)\b.*\b(NIC )?Link (is )?[Uu]p",
        "ionic 0000:b1:00.0 enp177s0: Link up - 400 Gbps",
        "Linux: drivers/net/ethernet/pensando/ionic/ionic_lif.c",
    ),
    _kernel(
        "nic-health",
        _F.NETWORK,
        _ERROR,
        "health",
        r"mlx5_core.*(health compromised|fatal error|health recovery)",
        "mlx5_core 0000:08:00.0: poll_health:801:(pid 0): device's health compromised - reached miss count",
        "Linux: drivers/net/ethernet/mellanox/mlx5/core/health.c",
    ),
    _kernel(
        "out-of-memory",
        _F.HOST_MEMORY,
        _ERROR,
        "ut of memory",
        r"[Oo]ut of memory: Killed process \d+",
        "Memory cgroup out of memory: Killed process 4242 (python) total-vm:81234567kB, anon-rss:64000000kB",
        "Linux: mm/oom_kill.c",
    ),
    _kernel(
        "disk-error",
        _F.DISK,
        _ERROR,
        "error",
        r"(I/O error, dev |EXT4-fs error|Buffer I/O error on dev)",
        "blk_update_request: I/O error, dev nvme0n1, sector 123456 op 0x1:(WRITE)",
        "Linux: block/blk-core.c",
    ),
    _kernel(
        "disk-error",
        _F.DISK,
        _ERROR,
        "nvme",
        r"nvme nvme\d+: (controller is down|I/O \d+ .*timeout)",
        "nvme nvme0: controller is down; will reset: CSTS=0xffffffff, PCI_STATUS=0x10",
        "Linux: drivers/nvme/host/pci.c",
    ),
    _trainer(
        "collective-network",
        _F.NETWORK,
        _ERROR,
        "NCCL WARN",
        r"NCCL WARN.*(NET/|ibv_|Connect|timed? ?out|socket)",
        "node7:4242:4300 [3] NCCL WARN NET/IB : Got completion from peer 10.0.0.4<41230> with status=12 opcode=0 len=0",
        "RCCL, NCCL: src/transport/net_ib.cc",
    ),
    _trainer(
        "collective-error",
        _F.NETWORK,
        _ERROR,
        "NCCL",
        r"NCCL.*(unhandled system error|remote process exited)",
        "INTERNAL: NCCL operation ncclGroupEnd() failed: unhandled system error.",
        "RCCL, NCCL: src/misc/utils.cc, through XLA",
    ),
    _trainer(
        "collective-stuck",
        _F.HANG,
        _WARNING,
        "may be stuck",
        r"This thread has been waiting for .* may be stuck",
        "This thread has been waiting for `all-reduce RunId{1}` for 20 seconds and may be stuck.",
        "XLA: xla/service/rendezvous.cc",
    ),
    _trainer(
        "device-memory",
        _F.DEVICE_MEMORY,
        _ERROR,
        "RESOURCE_EXHAUSTED",
        r"RESOURCE_EXHAUSTED: Out of memory",
        "jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes.",
        "XLA: allocators",
    ),
    _trainer(
        "device-memory",
        _F.DEVICE_MEMORY,
        _ERROR,
        "memory",
        r"Stopped: (.{1,80} ran out of memory|A step of .{1,300} of memory per device, but only)",
        "Stopped: Training ran out of memory: it requested 16 GB. Lower train.batch.micro_batch.",
        "zaya_jax.train.memory_errors",
    ),
    _trainer(
        "coordination-lost",
        _F.CRASH,
        _WARNING,
        "coordination",
        r"coordination service .*(unavailable|heartbeat|shutting down)",
        "Failed to send a heartbeat: the coordination service is unavailable",
        "JAX: distributed runtime",
    ),
    _trainer(
        "check-failed",
        _F.CRASH,
        _WARNING,
        "Check failed",
        r"Check failed: ",
        "F0101 12:00:00.000000    4242 gpu_executable.cc:77] Check failed: device != nullptr",
        "XLA, Abseil",
    ),
    _trainer(
        "no-checkpoint",
        _F.CHECKPOINT,
        _ERROR,
        "damaged",
        r"Stopped: Every checkpoint in .* is damaged",
        "Stopped: Every checkpoint in runs/tiny/checkpoints is damaged. They are kept there.",
        "zaya_jax.checkpoint.restore",
    ),
    _trainer(
        "checkpoint-quarantined",
        _F.CHECKPOINT,
        _WARNING,
        "quarantined",
        r"It was quarantined as ",
        "Checkpoint 40 is damaged. It was quarantined as 40.corrupt-20260101T000000. Trying the next older checkpoint.",
        "zaya_jax.checkpoint.restore",
    ),
    _trainer(
        "save-failed",
        _F.DISK,
        _WARNING,
        "could not be saved",
        r"The checkpoint of step \d+ could not be saved: ",
        "The checkpoint of step 40 could not be saved: No space left on device.",
        "zaya_jax.checkpoint.store",
    ),
    _trainer(
        "disk-full",
        _F.DISK,
        _ERROR,
        "Stopped: ",
        r"Stopped: .*(No space left on device|Disk quota exceeded)",
        "Stopped: [Errno 28] No space left on device: 'runs/tiny'. Free some space, then rerun the command.",
        "zaya_jax.errors",
    ),
    _trainer(
        SKIPPED,
        _F.SPIKE,
        _ERROR,
        "max_skipped_steps",
        r"The number of skipped steps in a row reached ",
        "Stopped: The number of skipped steps in a row reached train.max_skipped_steps=10 at step 60.",
        "zaya_jax.train.step_logger",
    ),
)


def match_line(source: Source, line: bytes) -> Signature | None:
    """Return the first signature that a line of a log matches; only its first 2048 bytes are looked at."""
    line = line[:_LONGEST_LINE]
    for signature in SIGNATURES:
        if signature.source == source and signature.word in line and signature.pattern.search(line):
            return signature
    return None


def observe_line(source: Source, line: bytes, rank: int | None = None) -> Observation | None:
    """Return what a line of a log tells; None if it tells of no fault."""
    signature = match_line(source, line)
    if signature is None:
        return None
    text = line[:_LONGEST_LINE].decode(errors="replace")
    return Observation(signature.code, signature.fault, signature.severity, text, rank)
