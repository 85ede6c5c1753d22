"""Log signatures: which lines of the kernel's log or of the output are signs of a fault.

The wording is that of the project or kernel file named beside each pattern; `tests/aegis/signature_samples.py` has a
sample. A pattern begins where its writer begins: at the start of a kernel message, behind the prefixes of dmesg and
syslog, or at the start of a line of output, with the prefix of the library that writes it. A text that quotes such a
message elsewhere is no sign. Patterns repeat at most a few hundred characters between fixed words, so that no line can
make a search slow.
"""

import re
from typing import Literal, NamedTuple

from zaya_jax.aegis.observation import FaultClass, Observation, Severity

LONGEST_LINE = 2048  # characters; longer lines are cut

Source = Literal["trainer", "kernel"]


class Signature(NamedTuple):
    """A sign of a fault in a log."""

    code: str  # stable name of what was observed. Several signatures share a code if the same rule applies to them.
    fault: FaultClass  # its class
    severity: Severity  # how bad it is
    pattern: str  # matches the start of a message


# What /dev/kmsg, dmesg and its options, journalctl and its formats, rsyslog and busybox write before a message of the
# kernel. What a program sends to syslog has its name instead of `kernel`, unless it lies.
_ISO = r"\d{4}-\d\d-\d\d[T ][\d:.,+-]{8,24}Z?"
_SINCE = r"\d{10}\.\d{6}|\[[ \d]{1,12}\.\d{6}\]"  # 1970, or the start of the machine
_STAMP = rf"(?:\w{{3}} [ \d]\d [\d:.]{{8,15}}|(?:\w{{3}} )?{_ISO}(?: \w{{3,5}})?|{_SINCE})"
_KERNEL_PREFIX = re.compile(
    r"(?:kern {1,4}:\w{1,8} {0,8}: |<\d{1,3}>(?:1 )?|[0-7],\d{1,20},\d{1,20},[-c+];)?"
    rf"(?:{_STAMP} [\w.:-]{{1,255}} (?:kern\.\w{{1,8}} )?kernel(?:: {{1,2}}| - - - {{1,2}}))?"
    r"(?:\[(?:[ \d]{1,12}\.\d{1,9}|\w{3} \w{3} [ \d]\d [\d:]{8} \d{4}|\w{3}\d\d [\d:]{5})(?: <[ \d.]{1,20}>)?\] ?)?"
    rf"(?:{_ISO} )?"
    r"(?:\[ {0,8}[TC]\d{1,8}\] ?)?", re.ASCII,
)  # fmt: skip


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


def observe_line(source: Source, line: str, rank: int | None = None) -> Observation | None:
    """Return what the first `LONGEST_LINE` characters of a line of a log tell; None if they tell of no fault."""
    line = line[:LONGEST_LINE]
    start = _KERNEL_PREFIX.match(line) if source == "kernel" else None
    found = _PATTERNS[source].match(line, start.end() if start else 0)
    if found is None or found.lastindex is None or (start and _ABOUT_PROGRAM.match(line, start.end())):
        return None
    signature = SIGNATURES[source][found.lastindex - 1]
    return Observation(signature.code, signature.fault, signature.severity, line, rank)


_INFO, _WARNING, _ERROR, _FATAL = Severity.INFO, Severity.WARNING, Severity.ERROR, Severity.FATAL
_GPU, _NETWORK, _CRASH, _HANG = FaultClass.GPU, FaultClass.NETWORK, FaultClass.CRASH, FaultClass.HANG
_DISK, _CHECKPOINT = FaultClass.DISK, FaultClass.CHECKPOINT
_HOST_MEMORY, _DEVICE_MEMORY = FaultClass.HOST_MEMORY, FaultClass.DEVICE_MEMORY

_BDF = r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]"  # address of a PCI device
_AMD = rf"(?:amdgpu {_BDF}: (?:amdgpu: )?|amdgpu: |\[drm[^\]]{{0,80}}\]{{1,2}} )"  # by version of the driver
_RAS = _AMD + r"(?:\{\d{1,20}\})?.{0,80}?"  # socket and die, in some versions
_AER = rf"[\w-]{{1,40}} {_BDF}: (?:AER: (?:Multiple )?|PCIe Bus Error: severity=)"
_MLX = rf"mlx5_core {_BDF}: .{{0,120}}"
_NETDEV = rf"(?:[\w-]{{1,40}} {_BDF}:? )?[\w.-]{{1,40}}(?: \([\w ]{{1,40}}\))?: "  # driver and name of a network card
_PORT = rf"(?:[\w-]{{1,40}} {_BDF} |infiniband )\w{{1,40}}: Port: \d{{1,3}} Link "
# What each Xid means: NVIDIA's catalogue of Xid errors. Xids 13 and 31 are errors of the program, not of the GPU.
_XID = r"NVRM: Xid \(PCI:[^)]{1,40}\): "
_XIDS = "13|31|48|63|64|74|79|94|95|119|120|140|154"
_SXID = r"nvidia-nvswitch\d{1,3}:? SXid \(PCI:[^)]{1,40}\): \d{1,6}, "

_KERNEL = [
    # AMD GPUs. The driver repeats totals at each query ("in total"): only new errors count.
    ("gpu-uncorrectable-ecc", _GPU, _ERROR,  # amdgpu_ras.c
     _RAS + r"\b[1-9]\d{0,18} (?:new )?uncorrectable hardware errors detected in (?!total)"),
    ("gpu-uncorrectable-ecc", _GPU, _ERROR,  # amdgpu_ras.c
     _RAS + r"uncorrectable hardware error ?\(ERREVENT_ATHUB_INTERRUPT\) detected"),
    ("gpu-correctable-ecc", _GPU, _WARNING,  # amdgpu_ras.c
     _RAS + r"\b[1-9]\d{0,18} (?:new )?correctable hardware errors detected in (?!total)"),
    ("gpu-deferred-ecc", _GPU, _WARNING,  # amdgpu_ras.c
     _RAS + r"\b[1-9]\d{0,18} (?:new )?deferred hardware errors detected in (?!total)"),
    ("gpu-poison", _GPU, _ERROR, _RAS + r"RAS poison consumption"),  # kfd_int_process_v9.c
    ("gpu-reset", _GPU, _ERROR, _AMD + r"GPU reset begin!"),  # amdgpu_device.c
    ("gpu-reset-succeeded", _GPU, _INFO, _AMD + r"GPU reset ?\(\d{1,9}\) succeeded!"),  # amdgpu_device.c
    # amdgpu_device.c
    ("gpu-reset-failed", _GPU, _FATAL, _AMD + r"GPU reset(?: ?\(\d{1,9}\) failed| end with ret = -)"),
    ("gpu-ring-timeout", _GPU, _ERROR, _AMD + r"(?:\*ERROR\* )?ring \S{1,40} timeout, signaled seq="),  # amdgpu_job.c
    # amdgpu_job.c
    ("gpu-ring-recovered", _GPU, _WARNING, _AMD + r"(?:\*ERROR\* )?ring \S{1,40} timeout, but soft recovered"),
    # gmc_v9_0.c
    ("gpu-page-fault", _CRASH, _ERROR, _AMD + r"\[(?:gfx|mm)hub\d?\] (?:(?:no-)?retry )?page fault \(src_id:"),
    ("gpu-lost", _GPU, _FATAL, _AMD + r"device lost from bus"),  # amdgpu_device.c
    # PCI Express errors. A bridge reports them, so they may be those of a network card or disk too.
    ("pcie-fatal-error", _GPU, _ERROR, _AER + r"Uncorrect(?:able|ed) \(Fatal\)"),  # pcie/aer.c
    ("pcie-error", _GPU, _WARNING, _AER + r"Uncorrect(?:able|ed) \(Non-Fatal\)"),  # pcie/aer.c
    ("pcie-corrected-error", _GPU, _INFO, _AER + r"Correct(?:able|ed) error"),  # pcie/aer.c
    # NVIDIA GPUs and the switches between them.
    ("gpu-uncorrectable-ecc", _GPU, _ERROR, _XID + r"(?:48|94|95|140)\b"),  # NVIDIA driver
    ("gpu-row-remap", _GPU, _WARNING, _XID + r"63\b"),  # NVIDIA driver
    ("gpu-row-remap-failed", _GPU, _ERROR, _XID + r"64\b"),  # NVIDIA driver
    ("gpu-lost", _GPU, _FATAL, _XID + r"79\b"),  # NVIDIA driver
    ("nvlink-error", _GPU, _ERROR, _XID + r"74\b"),  # NVIDIA driver
    ("gpu-firmware-timeout", _GPU, _ERROR, _XID + r"(?:119|120)\b"),  # NVIDIA driver
    # NVIDIA driver
    ("gpu-recovery-action", _GPU, _ERROR, _XID + r"154\b.{0,80}recovery action changed from .{1,60} to 0x[1-9a-fA-F]"),
    ("gpu-exception", _CRASH, _ERROR, _XID + r"13\b"),  # NVIDIA driver
    ("gpu-page-fault", _CRASH, _ERROR, _XID + r"31\b"),  # NVIDIA driver
    ("gpu-xid", _GPU, _WARNING, _XID + rf"(?!(?:{_XIDS})\b)\d"),  # NVIDIA driver
    ("nvswitch-fatal-error", _GPU, _ERROR, _SXID + r"Fatal\b"),  # NVIDIA driver, fabric manager
    ("nvswitch-error", _GPU, _WARNING, _SXID + r"Non-[Ff]atal\b"),  # NVIDIA driver, fabric manager
    # Memory and processors of the host, whose node is as faulty as one with a broken GPU.
    ("memory-uncorrectable", _GPU, _ERROR, r"EDAC MC\d{1,4}: [1-9]\d{0,9} UE\b"),  # edac_mc.c
    ("memory-correctable", _GPU, _INFO, r"EDAC MC\d{1,4}: [1-9]\d{0,9} CE\b"),  # edac_mc.c
    ("machine-check", _GPU, _ERROR,  # mce_amd.c, mce/core.c, cper.c
     r"(?:mce: |\{\d{1,9}\})?\[Hardware Error\]: (?:Uncorrected, software (?:restartable|containable) error|System "
     r"Fatal error|CPU \d{1,5}: Machine Check Exception|event severity: (?:fatal|recoverable))"),
    # kernel/watchdog.c
    ("soft-lockup", _HANG, _ERROR, r"(?:NMI )?(?:watchdog: )?BUG: soft lockup - CPU#\d{1,5} stuck for \d{1,9}s!"),
    # kernel/watchdog.c
    ("hard-lockup", _HANG, _ERROR, r"(?:NMI )?watchdog: (?:CPU\d{1,5}: )?Watchdog detected hard LOCKUP on cpu \d"),
    # kernel/hung_task.c
    ("hung-task", _HANG, _WARNING, r"INFO: task .{1,40}:\d{1,9} blocked for more than \d{1,9} seconds\."),
    # Network cards. Whether a link stays down is measured from sysfs (`network`).
    # ionic_lif.c, mlx5 en_main.c, bnxt.c, ixgbe_main.c, phy.c
    ("link-down", _NETWORK, _WARNING, _NETDEV + r"(?:NIC )?(?:Link down|Link is [Dd]own)\b"),
    # ionic_lif.c, mlx5 en_main.c, bnxt.c, ixgbe_main.c, phy.c
    ("link-up", _NETWORK, _INFO, _NETDEV + r"(?:NIC )?(?:Link up|Link is [Uu]p)\b"),
    ("link-down", _NETWORK, _WARNING, _PORT + r"DOWN"),  # InfiniBand core
    ("link-up", _NETWORK, _INFO, _PORT + r"ACTIVE"),  # InfiniBand core
    # ionic_dev.c
    ("nic-firmware-stalled", _NETWORK, _WARNING, rf"ionic {_BDF}(?: \S{{1,20}})?: FW (?:heartbeat stalled|Down)"),
    ("nic-failed", _NETWORK, _ERROR,  # mlx5 health.c
     _MLX + r"(?:device's health compromised|Fatal error \d{1,9} detected|health recovery f)"),
    # Memory of the host. The kernel writes both lines for each kill.
    ("host-out-of-memory", _HOST_MEMORY, _ERROR,  # oom_kill.c
     r"(?:Out of memory|Memory cgroup out of memory)(?: \([^)]{1,40}\))?: Kill(?:ed)? process \d"),
    ("host-out-of-memory", _HOST_MEMORY, _ERROR, r"oom-kill:constraint="),  # oom_kill.c
    # Disks and file servers.
    ("filesystem-error", _DISK, _ERROR, r"EXT4-fs error \(device "),  # ext4/super.c
    ("filesystem-error", _DISK, _ERROR,  # xfs_fsops.c
     r"XFS \([^)]{1,40}\): .{0,200}(?:Corruption of |I/O [Ee]rror|Shutting down filesystem|has been shut down)"),
    ("filesystem-error", _DISK, _ERROR, r"EXT4-fs \([^)]{1,40}\): Remounting filesystem read-only"),  # ext4/super.c
    ("disk-io-error", _DISK, _ERROR,  # blk-mq.c
     r"(?:blk_update_request: |print_req_error: )?(?:I/O|critical medium|critical target) error, dev \S{1,40}, sector"),
    # nvme/host/pci.c
    ("disk-lost", _DISK, _ERROR, r"nvme nvme\d{1,4}: (?:Disabling|Removing) (?:device )?after .{0,20}failure"),
    # nvme/host/pci.c
    ("disk-timeout", _DISK, _WARNING, r"nvme nvme\d{1,4}: (?:controller is down; will reset|I/O .{1,80} timeout)"),
    ("file-server-silent", _DISK, _WARNING, r"nfs: server \S{1,200} not responding"),  # sunrpc/clnt.c
    ("file-server-silent", _DISK, _WARNING,  # lustre/ptlrpc/import.c
     r"Lustre(?:Error: [\d-]{1,12})?: \S{1,120}: Connection to \S{1,80} \(at \S{1,80}\) was lost;"),
    ("file-server-evicted", _DISK, _ERROR,  # lustre/ptlrpc/import.c
     r"LustreError: (?:[\d-]{1,12}: )?(?:\S{1,120}: )?This client was evicted by \S"),
]  # fmt: skip

_NCCL = (r"(?:\[[\d :.T-]{10,40}\] )?[\w.-]{1,255}:\d{1,10}:\d{1,10} \[\d{1,4}\] (?:[\w./-]{1,100}:\d{1,6} )?"
         "NCCL WARN ")  # fmt: skip
_IB = _NCCL + r"NET/IB ?: "
_ERROR_OF_JAX = r"(?:[\w.]{1,60}\.)?(?:Xla|Jax)RuntimeError: "  # the last line of a traceback
_GLOG = (r"(?:[IWEF]\d{4} [\d:.]{8,15} {1,6}\d{1,10}|\d{4}-\d\d-\d\d [\d:.]{8,15}: [IWEF]) "
         r"[\w./-]{1,120}:\d{1,6}\] ")  # fmt: skip
_XLA = rf"(?:{_GLOG}|{_ERROR_OF_JAX})"
_COLLECTIVE = _XLA + "INTERNAL: .{0,200}"
_GLOO = rf"(?:{_XLA}.{{0,300}})?\[[\w./-]{{0,80}}gloo/transport/[^\]]{{1,60}}\] .{{0,120}}"
_OS_ERROR = r"(?:[\w.]{1,60}\.)?\w{0,30}Error: \[Errno "

_TRAINER = [
    # zaya_jax's own. What ends it is in its exit record.
    ("checkpoint-damaged", _CHECKPOINT, _WARNING,  # zaya_jax/checkpoint/restore.py
     r".{1,600}It was quarantined as .{1,200}\. Trying the next older checkpoint"),
    # zaya_jax/checkpoint/restore.py
    ("checkpoint-damaged", _CHECKPOINT, _ERROR, r"Error: .{1,600} is damaged, but cannot be quarantined"),
    ("checkpoint-superseded", _CHECKPOINT, _WARNING,  # zaya_jax/run/checkpoints.py
     r"The checkpoint of step \d{1,18} was saved by superseded processes"),
    ("save-failed", _DISK, _WARNING,  # zaya_jax/checkpoint/store.py
     r"The checkpoint of step \d{1,18} could not be saved: .{1,1000} Training continues;"),
    ("save-recovered", _DISK, _INFO, r"The checkpoint of step \d{1,18} is saved\."),  # zaya_jax/checkpoint/store.py
    # RCCL and NCCL. A lost peer is a consequence: the fault is that of the process that ended first.
    ("rdma-retry-exceeded", _NETWORK, _ERROR,  # RCCL net_ib.cc, NCCL net_ib/p2p.cc
     _IB + r"Got completion from peer .{1,200} (?:with )?status=(?:IBV_WC_RETRY_EXC_ERR|12\b)"),
    ("rdma-error", _NETWORK, _ERROR,  # RCCL net_ib.cc, NCCL net_ib/p2p.cc
     _IB + r"Got completion from peer .{1,200} (?:with )?status=(?!IBV_WC_RETRY_EXC_ERR|12\b)"),
    # RCCL net_ib.cc, NCCL net_ib/common.cc
    ("rdma-event", _NETWORK, _WARNING, _IB + r"\S{1,60} (?:Got )?(?:non-fatal )?async (?:fatal )?event"),
    # RCCL misc/socket.cc, NCCL os/linux.cc
    ("collective-timeout", _NETWORK, _ERROR, _NCCL + r".{1,200}exceeded (?:timeouts|error retry count)"),
    # RCCL init.cc
    ("collective-failed", _NETWORK, _ERROR, _COLLECTIVE + r"unhandled system error \(run with NCCL_DEBUG"),
    ("collective-failed", _CRASH, _ERROR, _COLLECTIVE + r"unhandled cuda error \(run with NCCL_DEBUG"),  # RCCL init.cc
    # RCCL init.cc
    ("peer-lost", _CRASH, _WARNING, _COLLECTIVE + r"remote process exited or there was a network error"),
    ("peer-lost", _CRASH, _WARNING, _NCCL + r".{1,80}Connection closed by remote peer"),  # RCCL misc/socket.cc
    ("collective-timeout", _HANG, _ERROR,  # PyTorch ProcessGroupNCCL.cpp
     r"(?:\[rank\d{1,6}\]: ?)?(?:\[E[^\]]{1,80}\] )?\[Rank \d{1,6}\] Watchdog caught collective operation timeout"),
    # XLA and jax's coordination service.
    ("device-out-of-memory", _DEVICE_MEMORY, _ERROR,  # XLA bfc_allocator
     _ERROR_OF_JAX + r"RESOURCE_EXHAUSTED: (?!Received message).{0,300}(?:[Oo]ut of memory|allocat)"),
    ("collective-stuck", _HANG, _WARNING,  # XLA rendezvous.cc
     _GLOG + r".{0,100}This thread has been waiting for `.{1,600} seconds and may be stuck\."),
    # XLA rendezvous.cc
    ("collective-timeout", _HANG, _ERROR, _GLOG + r".{0,100}Termination timeout for `.{1,600} seconds exceeded\."),
    ("barrier-timeout", _HANG, _ERROR, _XLA + r".{0,200}Barrier timed out\. Id: "),  # XLA coordination_service.cc
    # XLA coordination_service.cc
    ("deadline-exceeded", _HANG, _WARNING, _ERROR_OF_JAX + r"DEADLINE_EXCEEDED: (?!Barrier timed out)"),
    ("peer-lost", _CRASH, _WARNING,  # XLA coordination_service.cc, distributed/client.h
     _XLA + r".{0,300}(?:tasks are unhealthy \(stopped sending heartbeats\)|heartbeat timeout\. This indicates that "
     "the remote task|because the JAX distributed service detected fatal errors)"),
    ("check-failed", _CRASH, _ERROR, _GLOG + r"Check failed: "),  # abseil logging
    ("check-failed", _CRASH, _ERROR, _COLLECTIVE + r"RET_CHECK failure \("),  # XLA status_macros.cc
    # Gloo, ROCm, Python, Slurm and the C library.
    ("peer-lost", _CRASH, _WARNING,  # Gloo tcp/pair.cc
     _GLOO + r"(?:Connection (?:reset|closed) by|Socket (?:unexpectedly )?closed|Broken pipe)"),
    # Gloo tcp/unbound_buffer.cc
    ("collective-timeout", _HANG, _ERROR, _GLOO + r"(?:Timed out waiting|(?:Read|Write) timeout|Application timeout)"),
    ("gpu-page-fault", _CRASH, _ERROR, r"Memory access fault by GPU node-\d"),  # ROCr runtime.cpp
    ("gpu-exception", _CRASH, _ERROR,  # ROCm clr rocdevice.cpp
     r":\d:rocdevice\.cpp {1,8}:.{1,300}callbackQueue aborting with error : HSA_STATUS_ERROR"),
    ("python-crash", _CRASH, _ERROR, r"Fatal Python error: "),  # CPython faulthandler
    ("traceback-timeout", _HANG, _ERROR, r"Timeout \(\d{1,6}:\d\d:\d\d(?:\.\d{1,6})?\)!"),  # CPython faulthandler
    # Slurm task_cgroup_memory.c
    ("host-out-of-memory", _HOST_MEMORY, _ERROR, r"slurmstepd: error: Detected \d{1,9} oom[_-]kill event"),
    ("host-out-of-memory", _HOST_MEMORY, _ERROR, r"(?:numpy\.\S{1,60}\._Array)?MemoryError\b"),  # CPython
    ("disk-full", _DISK, _ERROR, _OS_ERROR + r"(?:28|122)\] "),  # CPython, ENOSPC and EDQUOT
    ("disk-io-error", _DISK, _ERROR, _OS_ERROR + r"5\] "),  # CPython, EIO
]  # fmt: skip

SIGNATURES: dict[Source, list[Signature]] = {
    "kernel": [Signature(*fields) for fields in _KERNEL], "trainer": [Signature(*fields) for fields in _TRAINER],
}  # fmt: skip
# NAME[PID]: the kernel's message about a program, which chooses its name of up to 15 bytes; some are escaped.
_ABOUT_PROGRAM = re.compile(r"(?:\\x[0-9a-f]{2}|.){0,15}\[\d{1,10}\]")
# The group that matches tells the signature. re.ASCII: digits of other scripts are text, not numbers.
_PATTERNS = {source: re.compile("|".join(f"({sign.pattern})" for sign in signatures), re.ASCII)
             for source, signatures in SIGNATURES.items()}  # fmt: skip
