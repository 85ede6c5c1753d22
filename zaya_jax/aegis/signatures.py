"""Log signatures: which lines of a trainer or of the kernel are signs of a fault.

The wording is that of the sources named in `origin`. Each pattern is searched only in lines that contain its `literal`,
so harmless lines cost about 40 substring tests. Patterns repeat at most a few hundred characters between fixed words,
so that no line can make a search slow.
"""

import dataclasses
import re
from typing import Literal

from zaya_jax.aegis.observation import FaultClass, Observation, Severity

LONGEST_LINE = 2048  # characters; longer lines are cut
SKIPPED = "too-many-skipped-steps"  # code of a trainer that stopped itself
_CONTEXT = 120  # characters of evidence before a match far into a line

Source = Literal["trainer", "kernel"]


@dataclasses.dataclass(frozen=True)
class Signature:
    """A sign of a fault in a log.

    Attributes:
      code: stable name of what was observed. Several signatures share a code if the same rule applies to them.
      fault: its class.
      severity: how bad it is.
      source: the log in which it appears.
      literal: text that every matching line contains.
      pattern: searched in lines that contain `literal`.
      sample: a line that matches.
      origin: project or kernel file that writes it.
    """

    code: str
    fault: FaultClass
    severity: Severity
    source: Source
    literal: str
    pattern: re.Pattern[str]
    sample: str
    origin: str

    def observe(self, line: str, rank: int | None = None) -> Observation:
        """Return the observation of `line`, which matched; its evidence starts shortly before the match."""
        match_at = self.pattern.search(line[:LONGEST_LINE])
        start = max(0, match_at.start() - _CONTEXT) if match_at else 0
        return Observation(self.code, self.fault, self.severity, line[start:LONGEST_LINE], rank)


def match(source: Source, line: str) -> Signature | None:
    """Return the first signature of `source` that matches the first `LONGEST_LINE` characters of `line`, or None."""
    line = line[:LONGEST_LINE]
    for literal, search, signature in _SEARCHES[source]:
        if literal in line and search(line):
            return signature
    return None


class LineReader:
    """Splits the bytes of a stream into lines of at most `LONGEST_LINE` bytes, in bounded memory.

    A longer line is cut, and its rest dropped. A carriage return ends a line too, as in progress bars. Blank lines are
    skipped, and bytes that are not UTF-8 become U+FFFD.
    """

    def __init__(self) -> None:
        self._tail = b""  # start of the line that has no end yet

    def feed(self, data: bytes) -> list[str]:
        """Return the lines that `data` completes."""
        first, *rest = data.replace(b"\r", b"\n").split(b"\n")
        self._tail += first[: LONGEST_LINE - len(self._tail)]
        if not rest:
            return []
        complete = [self._tail, *rest[:-1]]
        self._tail = rest[-1][:LONGEST_LINE]
        return [line[:LONGEST_LINE].decode("utf-8", "replace") for line in complete if line.strip()]

    def flush(self) -> list[str]:
        """Return the last line, which had no end, when the stream is closed."""
        return self.feed(b"\n")


def observe_line(source: Source, line: bytes, rank: int | None = None) -> Observation | None:
    """Return what a line of a log tells; None if it tells of no fault."""
    text = line[:LONGEST_LINE].decode(errors="replace")
    signature = match(source, text)
    return None if signature is None else signature.observe(text, rank)


_INFO, _WARNING, _ERROR, _FATAL = Severity.INFO, Severity.WARNING, Severity.ERROR, Severity.FATAL
_GPU, _NETWORK, _CRASH, _HANG = FaultClass.GPU, FaultClass.NETWORK, FaultClass.CRASH, FaultClass.HANG
_DISK, _CHECKPOINT = FaultClass.DISK, FaultClass.CHECKPOINT
_HOST_MEMORY, _DEVICE_MEMORY = FaultClass.HOST_MEMORY, FaultClass.DEVICE_MEMORY


def _entry(
    source: Source, code: str, fault: FaultClass, level: Severity, literal: str, pattern: str, sample: str, origin: str
) -> Signature:
    # re.ASCII: digits of other scripts in a log are text, not numbers
    return Signature(code, fault, level, source, literal, re.compile(pattern, re.ASCII), sample, origin)


# What each Xid means: NVIDIA's catalogue of Xid errors. Xids 13 and 31 are errors of the program, not of the GPU.
_XID = r"NVRM: Xid \(PCI:[^)]{1,40}\): "
_XIDS = "13|31|48|63|64|74|79|94|95|119|120|140|154"

_KERNEL = [
    # AMD GPUs. The driver repeats totals at each query ("in total"): only new errors count.
    ("gpu-uncorrectable-ecc", _GPU, _ERROR, "uncorrectable hardware error",
     r"\b[1-9]\d{0,18} (?:new )?uncorrectable hardware errors detected in (?!total)",
     "amdgpu 0000:0c:00.0: amdgpu: socket: 0, die: 0, 1 new uncorrectable hardware errors detected in umc block",
     "amdgpu_ras.c"),
    ("gpu-uncorrectable-ecc", _GPU, _ERROR, "ERREVENT_ATHUB_INTERRUPT",
     r"uncorrectable hardware error ?\(ERREVENT_ATHUB_INTERRUPT\) detected",
     "amdgpu 0000:0c:00.0: amdgpu: uncorrectable hardware error(ERREVENT_ATHUB_INTERRUPT) detected!", "amdgpu_ras.c"),
    ("gpu-correctable-ecc", _GPU, _WARNING, " correctable hardware errors",
     r"\b[1-9]\d{0,18} (?:new )?correctable hardware errors detected in (?!total)",
     "amdgpu 0000:0c:00.0: amdgpu: 3 correctable hardware errors detected in umc block", "amdgpu_ras.c"),
    ("gpu-deferred-ecc", _GPU, _WARNING, "deferred hardware errors",
     r"\b[1-9]\d{0,18} (?:new )?deferred hardware errors detected in (?!total)",
     "amdgpu 0000:0c:00.0: amdgpu: socket: 0, die: 0, 2 new deferred hardware errors detected in umc block",
     "amdgpu_ras.c"),
    ("gpu-poison", _GPU, _ERROR, "RAS poison consumption", r"RAS poison consumption",
     "amdgpu 0000:0c:00.0: amdgpu: RAS poison consumption, fall back to gpu reset flow: client id 27",
     "kfd_int_process_v9.c"),
    ("gpu-reset", _GPU, _ERROR, "GPU reset begin!", r"GPU reset begin!",
     "amdgpu 0000:0c:00.0: amdgpu: GPU reset begin!. Source:  4", "amdgpu_device.c"),
    ("gpu-reset-succeeded", _GPU, _INFO, ") succeeded!", r"GPU reset ?\(\d{1,9}\) succeeded!",
     "amdgpu 0000:0c:00.0: amdgpu: GPU reset(2) succeeded!", "amdgpu_device.c"),
    ("gpu-reset-failed", _GPU, _FATAL, "GPU reset", r"GPU reset(?: ?\(\d{1,9}\) failed| end with ret = -)",
     "amdgpu 0000:0c:00.0: amdgpu: GPU reset(2) failed", "amdgpu_device.c"),
    ("gpu-ring-timeout", _GPU, _ERROR, " timeout, signaled seq=", r"ring \S{1,40} timeout, signaled seq=",
     "[drm:amdgpu_job_timedout [amdgpu]] *ERROR* ring sdma0 timeout, signaled seq=550221, emitted seq=550223",
     "amdgpu_job.c"),
    ("gpu-ring-recovered", _GPU, _WARNING, " timeout, but soft recovered", r"ring \S{1,40} timeout, but soft recovered",
     "amdgpu 0000:0c:00.0: amdgpu: ring comp_1.0.0 timeout, but soft recovered", "amdgpu_job.c"),
    ("gpu-page-fault", _CRASH, _ERROR, "page fault (src_id:",
     r"\[(?:gfx|mm)hub\d?\] (?:(?:no-)?retry )?page fault \(src_id:",
     "amdgpu 0000:84:00.0: amdgpu: [gfxhub0] no-retry page fault (src_id:0 ring:40 vmid:8 pasid:32769, for process "
     "python pid 3148 thread python pid 3148)", "gmc_v9_0.c"),
    ("gpu-lost", _GPU, _FATAL, "device lost from bus", r"amdgpu.{1,60}device lost from bus",
     "amdgpu 0000:0c:00.0: amdgpu: device lost from bus!", "amdgpu_device.c"),
    # PCI Express errors. A bridge reports them, so they may be those of a network card or disk too.
    ("pcie-fatal-error", _GPU, _ERROR, "(Fatal)",
     r"(?:AER: (?:Multiple )?|severity=)Uncorrect(?:able|ed) \(Fatal\)",
     "pcieport 0000:00:02.1: AER: Uncorrectable (Fatal) error message received from 0000:0c:00.0", "pcie/aer.c"),
    ("pcie-error", _GPU, _WARNING, "(Non-Fatal)",
     r"(?:AER: (?:Multiple )?|severity=)Uncorrect(?:able|ed) \(Non-Fatal\)",
     "pcieport 0000:00:01.1: PCIe Bus Error: severity=Uncorrected (Non-Fatal), type=Transaction Layer, (Requester ID)",
     "pcie/aer.c"),
    ("pcie-corrected-error", _GPU, _INFO, "AER: ", r"AER: (?:Multiple )?Correct(?:able|ed) error",
     "pcieport 0000:00:1c.4: AER: Correctable error message received from 0000:07:00.0", "pcie/aer.c"),
    # NVIDIA GPUs.
    ("gpu-uncorrectable-ecc", _GPU, _ERROR, "NVRM: Xid", _XID + r"(?:48|94|95|140)\b",
     "NVRM: Xid (PCI:0000:01:00): 94, pid=7194, Contained: CE User Channel (0x9). RST: No, D-RST: No", "NVIDIA driver"),
    ("gpu-row-remap", _GPU, _WARNING, "NVRM: Xid", _XID + r"63\b",
     "NVRM: Xid (PCI:0000:3b:00): 63, pid=1, Row Remapper: New row marked for remapping, reset gpu to activate.",
     "NVIDIA driver"),
    ("gpu-row-remap-failed", _GPU, _ERROR, "NVRM: Xid", _XID + r"64\b",
     "NVRM: Xid (PCI:0000:3b:00): 64, pid=1, Row Remapper: Error recording remapping", "NVIDIA driver"),
    ("gpu-lost", _GPU, _FATAL, "NVRM: Xid", _XID + r"79\b",
     "NVRM: Xid (PCI:0000:02:00): 79, pid=4242, name=python, GPU has fallen off the bus.", "NVIDIA driver"),
    ("nvlink-error", _GPU, _ERROR, "NVRM: Xid", _XID + r"74\b",
     "NVRM: Xid (PCI:0000:3b:00): 74, pid=5678, NVLink: fatal error detected on link 4(0x10000, 0x0, 0x0)",
     "NVIDIA driver"),
    ("gpu-firmware-timeout", _GPU, _ERROR, "NVRM: Xid", _XID + r"(?:119|120)\b",
     "NVRM: Xid (PCI:0000:83:00): 119, pid=2710030, name=python, Timeout waiting for RPC from GSP!", "NVIDIA driver"),
    ("gpu-recovery-action", _GPU, _ERROR, "NVRM: Xid",
     _XID + r"154\b.{0,80}recovery action changed from .{1,60} to 0x[1-9a-fA-F]",
     "NVRM: Xid (PCI:0000:5d:00): 154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)",
     "NVIDIA driver"),
    ("gpu-exception", _CRASH, _ERROR, "NVRM: Xid", _XID + r"13\b",
     "NVRM: Xid (PCI:0000:01:00): 13, pid=99, name=python, Graphics SM Warp Exception on (GPC 0, TPC 1, SM 0)",
     "NVIDIA driver"),
    ("gpu-page-fault", _CRASH, _ERROR, "NVRM: Xid", _XID + r"31\b",
     "NVRM: Xid (PCI:0000:01:00): 31, pid=99, name=python, Ch 00000010, MMU Fault: ENGINE GRAPHICS", "NVIDIA driver"),
    ("gpu-xid", _GPU, _WARNING, "NVRM: Xid", _XID + rf"(?!(?:{_XIDS})\b)\d",
     "NVRM: Xid (PCI:0000:01:00): 109, pid=4242, name=python, errorString CTX SWITCH TIMEOUT", "NVIDIA driver"),
    # Network cards. Whether a link stays down is measured from sysfs (`network`).
    ("link-down", _NETWORK, _WARNING, ": Link down", r"\b(?:ionic|mlx5_core) \S{1,20} \S{1,20}: Link down",
     "ionic 0000:b5:00.0 enp181s0: Link down", "ionic_lif.c, mlx5 en_main.c"),
    ("link-up", _NETWORK, _INFO, ": Link up", r"\b(?:ionic|mlx5_core) \S{1,20} \S{1,20}: Link up",
     "mlx5_core 0000:04:00.0 enp4s0f0np0: Link up", "ionic_lif.c, mlx5 en_main.c"),
    ("link-down", _NETWORK, _WARNING, "Link is ", r"\bLink is [Dd]own\b",
     "bnxt_en 0000:3b:00.0 enp59s0f0np0: NIC Link is Down", "bnxt.c, ixgbe_main.c, phy.c"),
    ("link-up", _NETWORK, _INFO, "Link is ", r"\bLink is [Uu]p\b",
     "bnxt_en 0000:3b:00.0 enp59s0f0np0: NIC Link is Up, 200000 Mbps full duplex", "bnxt.c, ixgbe_main.c, phy.c"),
    ("link-down", _NETWORK, _WARNING, " Link DOWN", r"\bPort: \d{1,3} Link DOWN",
     "ionic 0000:b5:00.0 rocep181s0: Port: 1 Link DOWN", "InfiniBand core"),
    ("link-up", _NETWORK, _INFO, " Link ACTIVE", r"\bPort: \d{1,3} Link ACTIVE",
     "ionic 0000:b5:00.0 rocep181s0: Port: 1 Link ACTIVE", "InfiniBand core"),
    ("nic-firmware-stalled", _NETWORK, _WARNING, "ionic ", r"\bionic \S{1,20} ?\S{0,20}: FW (?:heartbeat stalled|Down)",
     "ionic 0000:24:00.0: FW heartbeat stalled at 3952797608", "ionic_dev.c"),
    ("nic-failed", _NETWORK, _ERROR, "mlx5_core ",
     r"\bmlx5_core .{1,120}(?:device's health compromised|Fatal error \d{1,9} detected|health recovery f)",
     "mlx5_core 0000:08:00.0: poll_health:823:(pid 0): device's health compromised - reached miss count",
     "mlx5 health.c"),
    # Memory of the host. The kernel writes both lines for each kill.
    ("host-out-of-memory", _HOST_MEMORY, _ERROR, "ut of memory",
     r"\b(?:Out of memory|Memory cgroup out of memory)(?: \([^)]{1,40}\))?: Kill(?:ed)? process \d",
     "Memory cgroup out of memory: Killed process 23793 (python) total-vm:2623712kB, anon-rss:506500kB", "oom_kill.c"),
    ("host-out-of-memory", _HOST_MEMORY, _ERROR, "oom-kill:constraint=", r"oom-kill:constraint=",
     "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),oom_memcg=/job,task_memcg=/job,task=python,pid=23793,uid=0",
     "oom_kill.c"),
    # Disks.
    ("filesystem-error", _DISK, _ERROR, "EXT4-fs error", r"EXT4-fs error \(device ",
     "EXT4-fs error (device nvme0n1p2): ext4_find_entry:1463: inode #2: comm python: reading directory lblock 0",
     "ext4/super.c"),
    ("filesystem-error", _DISK, _ERROR, "XFS (",
     r"XFS \([^)]{1,40}\): .{0,200}(?:Corruption of |I/O [Ee]rror|Shutting down filesystem|has been shut down)",
     "XFS (dm-0): Corruption of in-memory data (0x8) detected at xfs_trans_cancel+0x190/0x1b0 [xfs]",
     "xfs_fsops.c"),
    ("filesystem-error", _DISK, _ERROR, "Remounting filesystem read-only", r"Remounting filesystem read-only",
     "EXT4-fs (nvme0n1p2): Remounting filesystem read-only", "ext4/super.c"),
    ("disk-io-error", _DISK, _ERROR, " error, dev ",
     r"\b(?:I/O|critical medium|critical target) error, dev \S{1,40}, sector",
     "I/O error, dev nvme0n1, sector 2048 op 0x1:(WRITE) flags 0x800 phys_seg 1 prio class 2", "blk-mq.c"),
    ("disk-lost", _DISK, _ERROR, "nvme ",
     r"\bnvme nvme\d{1,4}: (?:Disabling|Removing) (?:device )?after .{0,20}failure",
     "nvme nvme0: Disabling device after reset failure: -19", "nvme/host/pci.c"),
    ("disk-timeout", _DISK, _WARNING, "nvme ",
     r"\bnvme nvme\d{1,4}: (?:controller is down; will reset|I/O .{1,80} timeout)",
     "nvme nvme0: controller is down; will reset: CSTS=0xffffffff, PCI_STATUS=0x10", "nvme/host/pci.c"),
    ("file-server-silent", _DISK, _WARNING, "nfs: server ", r"\bnfs: server \S{1,200} not responding",
     "nfs: server storage01 not responding, still trying", "sunrpc/clnt.c"),
]  # fmt: skip

_TRAINER = [
    # zaya_jax's own sentences come first: they say what happened, and may quote a system error.
    ("no-checkpoint", _CHECKPOINT, _FATAL, "Every checkpoint in ", r"Every checkpoint in .{1,600} is damaged\.",
     "Stopped: Every checkpoint in runs/tiny/checkpoints is damaged. They are kept there; start again in another "
     "run_dir.", "zaya_jax/checkpoint/restore.py"),
    ("checkpoint-damaged", _CHECKPOINT, _WARNING, "It was quarantined as ",
     r"It was quarantined as .{1,200}\. Trying the next older checkpoint",
     "runs/tiny/checkpoints/250/arrays does not match its checksum. It was quarantined as 250.corrupt. Trying the next "
     "older checkpoint.", "zaya_jax/checkpoint/restore.py"),
    ("checkpoint-damaged", _CHECKPOINT, _ERROR, "cannot be quarantined", r"is damaged, but cannot be quarantined",
     "Error: runs/tiny/checkpoints/250 is damaged, but cannot be quarantined (renamed): Permission denied.",
     "zaya_jax/checkpoint/restore.py"),
    ("checkpoint-superseded", _CHECKPOINT, _WARNING, "was saved by superseded processes",
     r"The checkpoint of step \d{1,18} was saved by superseded processes",
     "The checkpoint of step 500 was saved by superseded processes; it was quarantined as 500.stale.",
     "zaya_jax/run/checkpoints.py"),
    ("saves-failed", _DISK, _ERROR, "Saves have failed for ", r"Saves have failed for \d{1,18} s, more than ",
     "Stopped: The checkpoint of step 500 could not be saved: runs/tiny: Read-only file system. Saves have failed for "
     "3700 s, more than checkpoint.max_unsaved_seconds (3600 s); there is no checkpoint yet.",
     "zaya_jax/checkpoint/store.py"),
    ("save-failed", _DISK, _WARNING, " could not be saved: ",
     r"The checkpoint of step \d{1,18} could not be saved: .{1,1000} Training continues;",
     "The checkpoint of step 500 could not be saved: runs/tiny: Read-only file system. Training continues; the newest "
     "checkpoint is that of step 250. Retrying in about 5 s.", "zaya_jax/checkpoint/store.py"),
    ("save-recovered", _DISK, _INFO, " is saved.", r"The checkpoint of step \d{1,18} is saved\.",
     "The checkpoint of step 500 is saved.", "zaya_jax/checkpoint/store.py"),
    (SKIPPED, FaultClass.NON_FINITE, _ERROR, "train.max_skipped_steps=",
     r"reached train\.max_skipped_steps=.{1,80}\(reason for the last one: not finite\)",
     "Stopped: The number of skipped steps in a row reached train.max_skipped_steps=5 at step 91 (reason for the last "
     "one: not finite).", "zaya_jax/train/step_logger.py"),
    (SKIPPED, FaultClass.SPIKE, _ERROR, "train.max_skipped_steps=",
     r"reached train\.max_skipped_steps=.{1,80}\(reason for the last one: (?:loss|gradient) spike\)",
     "Stopped: The number of skipped steps in a row reached train.max_skipped_steps=5 at step 91 (reason for the last "
     "one: loss spike).", "zaya_jax/train/step_logger.py"),
    ("device-out-of-memory", _DEVICE_MEMORY, _ERROR, " ran out of memory",
     r"Stopped: .{1,300} ran out of memory(?:: it requested|, and \S{1,20} GB is available|\. )",
     "Stopped: A step of train ran out of memory: it requested 12.5 GB, and 192 GB is available per device. Lower "
     "train.batch.micro_batch.", "zaya_jax/train/memory_errors.py"),
    ("device-out-of-memory", _DEVICE_MEMORY, _ERROR, "of memory per device, but only",
     r"Stopped: A step of .{1,200} needs \S{1,20} \S{1,4} of memory per device, but only",
     "Stopped: A step of train needs 210 GB of memory per device, but only 192 GB is available.",
     "zaya_jax/train/memory_errors.py"),
    ("disk-full", _DISK, _ERROR, "Free some space, then rerun",
     r"Stopped: .{1,1000}Free some space, then rerun the command",
     "Stopped: [Errno 122] EDQUOT: 'runs/tiny/metrics.jsonl'. Free some space, then rerun the command.",
     "zaya_jax/errors.py"),
    ("peer-lost", _CRASH, _WARNING, "was lost: its connection closed", r"was lost: its connection closed",
     "Stopped: Process 1 on node2 was lost: its connection closed.", "zaya_jax/parallel/peer_liveness.py"),
    ("peer-lost", _CRASH, _WARNING, "sent no heartbeat for ", r"sent no heartbeat for [\d.]{1,12} s",
     "Stopped: Process 1 on node2 sent no heartbeat for 60 s.", "zaya_jax/parallel/peer_liveness.py"),
    # RCCL and NCCL. A lost peer is a consequence: the fault is that of the process that ended first.
    ("rdma-retry-exceeded", _NETWORK, _ERROR, "Got completion from peer ",
     r"NET/IB ?: Got completion from peer .{1,200} (?:with )?status=(?:IBV_WC_RETRY_EXC_ERR|12\b)",
     "node7:4242:4301 [0] net_ib.cc:1985 NCCL WARN NET/IB : Got completion from peer 10.0.0.8<51234> with status=12 "
     "opcode=0 len=0 vendor err 129 (Send)", "RCCL net_ib.cc, NCCL net_ib/p2p.cc"),
    ("rdma-error", _NETWORK, _ERROR, "Got completion from peer ",
     r"NET/IB ?: Got completion from peer .{1,200} (?:with )?status=(?!IBV_WC_RETRY_EXC_ERR|12\b)",
     "node7:4242:4301 [0] p2p.cc:688 NCCL WARN NET/IB: Got completion from peer 10.0.0.8<51234> with "
     "status=IBV_WC_RNR_RETRY_EXC_ERR(13) opcode=IBV_WC_SEND(0) vendor_err=0  hca ionic_0",
     "RCCL net_ib.cc, NCCL net_ib/p2p.cc"),
    ("rdma-event", _NETWORK, _WARNING, "async ", r"NET/IB ?: \S{1,60} (?:Got )?(?:non-fatal )?async (?:fatal )?event",
     "node7:4242:4299 [0] net_ib.cc:104 NCCL WARN NET/IB : ionic_0:1 Got async event : port error",
     "RCCL net_ib.cc, NCCL net_ib/common.cc"),
    ("collective-timeout", _NETWORK, _ERROR, "NCCL WARN ", r"NCCL WARN .{1,200}exceeded (?:timeouts|error retry count)",
     "node7:4242:4299 [0] misc/socket.cc:478 NCCL WARN socketStartConnect: exceeded timeouts (20)",
     "RCCL misc/socket.cc, NCCL os/linux.cc"),
    ("collective-failed", _NETWORK, _ERROR, "unhandled system error", r"unhandled system error \(run with NCCL_DEBUG",
     "XlaRuntimeError: INTERNAL: NCCL operation ncclGroupEnd() failed: unhandled system error (run with "
     "NCCL_DEBUG=INFO for details)", "RCCL init.cc"),
    ("collective-failed", _CRASH, _ERROR, "unhandled cuda error", r"unhandled cuda error \(run with NCCL_DEBUG",
     "XlaRuntimeError: INTERNAL: NCCL operation ncclAllReduce() failed: unhandled cuda error (run with "
     "NCCL_DEBUG=INFO for details)", "RCCL init.cc"),
    ("peer-lost", _CRASH, _WARNING, "remote process exited", r"remote process exited or there was a network error",
     "XlaRuntimeError: INTERNAL: NCCL operation ncclGroupEnd() failed: remote process exited or there was a network "
     "error", "RCCL init.cc"),
    ("peer-lost", _CRASH, _WARNING, "Connection closed by remote peer",
     r"NCCL WARN .{1,80}Connection closed by remote peer",
     "node7:4242:4299 [0] misc/socket.cc:52 NCCL WARN socketProgress: Connection closed by remote peer "
     "node8<43210>", "RCCL misc/socket.cc"),
    ("collective-timeout", _HANG, _ERROR, "Watchdog caught", r"Watchdog caught collective operation timeout",
     "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, OpType=BROADCAST, Timeout(ms)=600000) "
     "ran for 600081 milliseconds before timing out.", "PyTorch ProcessGroupNCCL.cpp"),
    # XLA and jax's coordination service.
    ("device-out-of-memory", _DEVICE_MEMORY, _ERROR, "RESOURCE_EXHAUSTED: ",
     r"RESOURCE_EXHAUSTED: (?!Received message).{0,300}(?:[Oo]ut of memory|allocat)",
     "jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 34359738368 bytes.",
     "XLA bfc_allocator"),
    ("collective-stuck", _HANG, _WARNING, "may be stuck.",
     r"This thread has been waiting for `.{1,600} seconds and may be stuck\.",
     "E0926 17:26:32.075402 157988 rendezvous.cc:127] [id=28] This thread has been waiting for `all reduce` for 20 "
     "seconds and may be stuck. Expected 8 threads to join the rendezvous, but not all of them arrived on time.",
     "XLA rendezvous.cc"),
    ("collective-timeout", _HANG, _ERROR, "Termination timeout for ",
     r"Termination timeout for `.{1,600} seconds exceeded\.",
     "F0926 17:26:52.075402 157988 rendezvous.cc:143] [id=28] Termination timeout for `all reduce` of 40 seconds "
     "exceeded. Exiting to ensure a consistent program state.", "XLA rendezvous.cc"),
    ("barrier-timeout", _HANG, _ERROR, "Barrier timed out. Id: ", r"Barrier timed out\. Id: ",
     "Barrier timed out. Id: step_500::0. This usually happens because a task triggered the barrier too early or too "
     "slowly.", "XLA coordination_service.cc"),
    ("deadline-exceeded", _HANG, _WARNING, "DEADLINE_EXCEEDED: ", r"DEADLINE_EXCEEDED: (?!Barrier timed out)",
     "jax.errors.JaxRuntimeError: DEADLINE_EXCEEDED: GetKeyValue() timed out with key: cuda:gpu_topology/1",
     "XLA coordination_service.cc"),
    ("peer-lost", _CRASH, _WARNING, "(stopped sending heartbeats)",
     r"tasks are unhealthy \(stopped sending heartbeats\)",
     "UNAVAILABLE: The following tasks are unhealthy (stopped sending heartbeats):", "XLA coordination_service.cc"),
    ("peer-lost", _CRASH, _WARNING, "heartbeat timeout.",
     r"heartbeat timeout\. This indicates that the remote task has failed",
     "/job:jax_worker/replica:0/task:1 heartbeat timeout. This indicates that the remote task has failed, got "
     "preempted, or crashed unexpectedly.", "XLA coordination_service.cc"),
    ("peer-lost", _CRASH, _WARNING, "JAX distributed service",
     r"because the JAX distributed service detected fatal errors",
     "F0926 17:26:32.075587  157988 client.h:77] Terminating process because the JAX distributed service detected "
     "fatal errors.", "XLA distributed/client.h"),
    ("check-failed", _CRASH, _ERROR, "] Check failed: ", r"\] Check failed: ",
     "F0926 17:26:32.075587  157988 gpu_executable.cc:412] Check failed: buffer != nullptr", "abseil logging"),
    ("check-failed", _CRASH, _ERROR, "RET_CHECK failure (", r"RET_CHECK failure \(",
     "XlaRuntimeError: INTERNAL: RET_CHECK failure (xla/service/gpu/gpu_executable.cc:512) buffers.size() == 2",
     "XLA status_macros.cc"),
    # Gloo, ROCm, Python, Slurm and the C library.
    ("peer-lost", _CRASH, _WARNING, "gloo/transport/",
     r"gloo/transport/[^\]]{1,60}\] .{0,120}"
     r"(?:Connection (?:reset|closed) by|Socket (?:unexpectedly )?closed|Broken pipe)",
     "[external/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:40123: Connection reset by peer. This is "
     "typically caused by a remote worker hanging or bugs in the application.", "Gloo tcp/pair.cc"),
    ("collective-timeout", _HANG, _ERROR, "gloo/transport/",
     r"gloo/transport/[^\]]{1,60}\] .{0,120}(?:Timed out waiting|(?:Read|Write) timeout|Application timeout)",
     "[external/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 30000ms for recv operation to complete",
     "Gloo tcp/unbound_buffer.cc"),
    ("gpu-page-fault", _CRASH, _ERROR, "Memory access fault by GPU", r"Memory access fault by GPU node-\d",
     "Memory access fault by GPU node-1 (Agent handle: 0x55d5c0) on address 0x7f2c. Reason: Page not present or "
     "supervisor privilege.", "ROCr runtime.cpp"),
    ("gpu-exception", _CRASH, _ERROR, "aborting with error : HSA_",
     r"callbackQueue aborting with error : HSA_STATUS_ERROR",
     ":0:rocdevice.cpp :2724: 1100 us: Callback: Queue 0x7f aborting with error : HSA_STATUS_ERROR_EXCEPTION: "
     "Device::callbackQueue aborting with error : HSA_STATUS_ERROR_EXCEPTION: code: 0x1016", "ROCm clr rocdevice.cpp"),
    ("python-crash", _CRASH, _ERROR, "Fatal Python error: ", r"^Fatal Python error: ",
     "Fatal Python error: Segmentation fault", "CPython faulthandler"),
    ("traceback-timeout", _HANG, _ERROR, "Timeout (", r"^Timeout \(\d{1,6}:\d\d:\d\d(?:\.\d{1,6})?\)!",
     "Timeout (0:05:00)!", "CPython faulthandler"),
    ("host-out-of-memory", _HOST_MEMORY, _ERROR, "oom", r"Detected \d{1,9} oom[_-]kill event",
     "slurmstepd: error: Detected 1 oom_kill event in StepId=512.0. Some of the step tasks have been OOM Killed.",
     "Slurm task_cgroup_memory.c"),
    ("host-out-of-memory", _HOST_MEMORY, _ERROR, "MemoryError", r"^(?:numpy\.\S{1,60}\._Array)?MemoryError\b",
     "MemoryError: Unable to allocate 64.0 GiB", "CPython"),
    ("disk-full", _DISK, _ERROR, "No space left on device", r"No space left on device",
     "OSError: [Errno 28] No space left on device: '/scratch/cache'", "C library, ENOSPC"),
    ("disk-full", _DISK, _ERROR, "Disk quota exceeded", r"Disk quota exceeded",
     "OSError: [Errno 122] Disk quota exceeded: '/scratch/cache'", "C library, EDQUOT"),
    ("disk-io-error", _DISK, _ERROR, "Input/output error", r"Input/output error",
     "OSError: [Errno 5] Input/output error: '/scratch/data/shard-00003'", "C library, EIO"),
]  # fmt: skip

CATALOGUE: tuple[Signature, ...] = (
    *(_entry("kernel", *fields) for fields in _KERNEL),
    *(_entry("trainer", *fields) for fields in _TRAINER),
)
_SEARCHES = {
    source: [(sign.literal, sign.pattern.search, sign) for sign in CATALOGUE if sign.source == source]
    for source in ("trainer", "kernel")
}
