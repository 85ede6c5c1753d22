"""Log signatures: which lines of the kernel's log or of the output are signs of a fault.

The wording is that of the project or kernel file named beside each pattern; `tests/aegis/signature_samples.py` has a
sample. A pattern begins where its writer begins: at the start of a kernel message, behind the prefixes of dmesg and
syslog, or at the start of a line of output, so that a quoted message is no sign. Patterns repeat at most a few hundred
characters, so that no line can make a search slow.
"""

import re
from typing import Literal, NamedTuple

from zaya_jax.aegis.failure import FaultClass, Observation, Severity

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
    r"(?:\[ {0,8}[TC]\d{1,8}\] ?)?",
    re.ASCII,
)


def observe_line(source: Source, line: str, rank: int | None = None) -> Observation | None:
    """Return what the first `LONGEST_LINE` characters of a line of a log tell; None if they tell of no fault."""
    line = line[:LONGEST_LINE]
    start = _KERNEL_PREFIX.match(line) if source == "kernel" else None
    match = _PATTERNS[source].match(line, start.end() if start else 0)
    if match is None or match.lastindex is None or (start and _ABOUT_PROGRAM.match(line, start.end())):
        return None
    signature = SIGNATURES[source][match.lastindex - 1]
    return Observation(signature.code, signature.fault, signature.severity, line, rank)


_INFO, _WARNING, _ERROR, _FATAL = Severity.INFO, Severity.WARNING, Severity.ERROR, Severity.FATAL
_Table = dict[tuple[FaultClass, Severity], dict[str, str | tuple[str, ...]]]

_BDF = r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]"  # address of a PCI device
_AMD = rf"(?:amdgpu {_BDF}: (?:amdgpu: )?|amdgpu: |\[drm[^\]]{{0,80}}\]{{1,2}} )"  # by version of the driver
_RING = _AMD + r"(?:\*ERROR\* )?ring \S{1,40} timeout, "
# Socket and die, in some versions. The driver repeats totals at each query ("in total"): only new errors count.
_RAS = _AMD + r"(?:\{\d{1,20}\})?.{0,80}?"
_COUNT, _DETECTED = r"\b[1-9]\d{0,18} (?:new )?", r" hardware errors detected in (?!total)"
_AER = rf"[\w-]{{1,40}} {_BDF}: (?:AER: (?:Multiple )?|PCIe Bus Error: severity=)"
_MLX = rf"mlx5_core {_BDF}: .{{0,120}}"
_NETDEV = rf"(?:[\w-]{{1,40}} {_BDF}:? )?[\w.-]{{1,40}}(?: \([\w ]{{1,40}}\))?: "  # driver and name of a network card
_PORT = rf"(?:[\w-]{{1,40}} {_BDF} |infiniband )\w{{1,40}}: Port: \d{{1,3}} Link "
# What each Xid means: NVIDIA's catalogue of Xid errors. Xids 13 and 31 are errors of the program, not of the GPU.
_XID = r"NVRM: Xid \(PCI:[^)]{1,40}\): "
_XIDS = "13|31|48|63|64|74|79|94|95|119|120|140|154"
_SXID = r"nvidia-nvswitch\d{1,3}:? SXid \(PCI:[^)]{1,40}\): \d{1,6}, "
_NVME = r"nvme nvme\d{1,4}: "

# Errors of PCI Express come from a bridge, so they may be those of a network card or disk too. Broken memory and
# processors of the host make a node as faulty as a broken GPU. Whether a link stays down is measured from sysfs.
_KERNEL: _Table = {
    (FaultClass.GPU, _FATAL): {
        "gpu-reset-failed": _AMD + r"GPU reset(?: ?\(\d{1,9}\) failed| end with ret = -)",  # amdgpu_device.c
        "gpu-lost": (_AMD + "device lost from bus", _XID + r"79\b"),  # amdgpu_device.c, NVIDIA driver
    },
    (FaultClass.GPU, _ERROR): {
        "gpu-uncorrectable-ecc": (  # amdgpu_ras.c, NVIDIA driver
            _RAS + _COUNT + "uncorrectable" + _DETECTED,
            _RAS + r"uncorrectable hardware error ?\(ERREVENT_ATHUB_INTERRUPT\) detected",
            _XID + r"(?:48|94|95|140)\b",
        ),
        "gpu-poison": _RAS + "RAS poison consumption",  # kfd_int_process_v9.c
        "gpu-reset": _AMD + "GPU reset begin!",  # amdgpu_device.c
        "gpu-ring-timeout": _RING + "signaled seq=",  # amdgpu_job.c
        "pcie-fatal-error": _AER + r"Uncorrect(?:able|ed) \(Fatal\)",  # pcie/aer.c
        "gpu-row-remap-failed": _XID + r"64\b",  # NVIDIA driver
        "nvlink-error": _XID + r"74\b",  # NVIDIA driver
        "gpu-firmware-timeout": _XID + r"(?:119|120)\b",  # NVIDIA driver
        "gpu-recovery-action": _XID + r"154\b.{0,80}recovery action changed from .{1,60} to 0x[1-9a-fA-F]",
        "nvswitch-fatal-error": _SXID + r"Fatal\b",  # NVIDIA driver, fabric manager
        "memory-uncorrectable": r"EDAC MC\d{1,4}: [1-9]\d{0,9} UE\b",  # edac_mc.c
        "machine-check": r"(?:mce: |\{\d{1,9}\})?\[Hardware Error\]: (?:"  # mce_amd.c, mce/core.c, cper.c
        r"Uncorrected, software (?:restartable|containable) error|System Fatal error"
        r"|CPU \d{1,5}: Machine Check Exception|event severity: (?:fatal|recoverable))",
    },
    (FaultClass.GPU, _WARNING): {
        "gpu-correctable-ecc": _RAS + _COUNT + "correctable" + _DETECTED,  # amdgpu_ras.c
        "gpu-deferred-ecc": _RAS + _COUNT + "deferred" + _DETECTED,  # amdgpu_ras.c
        "gpu-ring-recovered": _RING + "but soft recovered",  # amdgpu_job.c
        "pcie-error": _AER + r"Uncorrect(?:able|ed) \(Non-Fatal\)",  # pcie/aer.c
        "gpu-row-remap": _XID + r"63\b",  # NVIDIA driver
        "gpu-xid": _XID + rf"(?!(?:{_XIDS})\b)\d",  # NVIDIA driver
        "nvswitch-error": _SXID + r"Non-[Ff]atal\b",  # NVIDIA driver, fabric manager
    },
    (FaultClass.GPU, _INFO): {
        "gpu-reset-succeeded": _AMD + r"GPU reset ?\(\d{1,9}\) succeeded!",  # amdgpu_device.c
        "pcie-corrected-error": _AER + "Correct(?:able|ed) error",  # pcie/aer.c
        "memory-correctable": r"EDAC MC\d{1,4}: [1-9]\d{0,9} CE\b",  # edac_mc.c
    },
    (FaultClass.CRASH, _ERROR): {  # gmc_v9_0.c, NVIDIA driver
        "gpu-page-fault": (_AMD + r"\[(?:gfx|mm)hub\d?\] (?:(?:no-)?retry )?page fault \(src_id:", _XID + r"31\b"),
        "gpu-exception": _XID + r"13\b",
    },
    (FaultClass.HANG, _ERROR): {  # kernel/watchdog.c
        "soft-lockup": r"(?:NMI )?(?:watchdog: )?BUG: soft lockup - CPU#\d{1,5} stuck for \d{1,9}s!",
        "hard-lockup": r"(?:NMI )?watchdog: (?:CPU\d{1,5}: )?Watchdog detected hard LOCKUP on cpu \d",
    },
    # kernel/hung_task.c
    (FaultClass.HANG, _WARNING): {"hung-task": r"INFO: task .{1,40}:\d{1,9} blocked for more than \d{1,9} seconds\."},
    (FaultClass.NETWORK, _ERROR): {  # mlx5 health.c
        "nic-failed": _MLX + r"(?:device's health compromised|Fatal error \d{1,9} detected|health recovery f)",
    },
    (FaultClass.NETWORK, _WARNING): {
        # ionic_lif.c, mlx5 en_main.c, bnxt.c, ixgbe_main.c, phy.c; InfiniBand core
        "link-down": (_NETDEV + r"(?:NIC )?(?:Link down|Link is [Dd]own)\b", _PORT + "DOWN"),
        "nic-firmware-stalled": rf"ionic {_BDF}(?: \S{{1,20}})?: FW (?:heartbeat stalled|Down)",  # ionic_dev.c
    },
    (FaultClass.NETWORK, _INFO): {"link-up": (_NETDEV + r"(?:NIC )?(?:Link up|Link is [Uu]p)\b", _PORT + "ACTIVE")},
    (FaultClass.HOST_MEMORY, _ERROR): {
        "host-out-of-memory": (  # oom_kill.c, which writes both lines for each kill
            r"(?:Out of memory|Memory cgroup out of memory)(?: \([^)]{1,40}\))?: Kill(?:ed)? process \d",
            "oom-kill:constraint=",
        ),
    },
    (FaultClass.DISK, _ERROR): {
        "filesystem-error": (  # ext4/super.c, xfs_fsops.c
            r"EXT4-fs error \(device ",
            r"EXT4-fs \([^)]{1,40}\): Remounting filesystem read-only",
            r"XFS \([^)]{1,40}\): .{0,200}(?:Corruption of |I/O [Ee]rror|Shutting down filesystem|has been shut down)",
        ),
        "disk-io-error": "(?:blk_update_request: |print_req_error: )?"  # blk-mq.c
        r"(?:I/O|critical medium|critical target) error, dev \S{1,40}, sector",
        "disk-lost": _NVME + "(?:Disabling|Removing) (?:device )?after .{0,20}failure",  # nvme/host/pci.c
        # lustre/ptlrpc/import.c
        "file-server-evicted": r"LustreError: (?:[\d-]{1,12}: )?(?:\S{1,120}: )?This client was evicted by \S",
    },
    (FaultClass.DISK, _WARNING): {
        "disk-timeout": _NVME + "(?:controller is down; will reset|I/O .{1,80} timeout)",  # nvme/host/pci.c
        "file-server-silent": (  # sunrpc/clnt.c, lustre/ptlrpc/import.c
            r"nfs: server \S{1,200} not responding",
            r"Lustre(?:Error: [\d-]{1,12})?: \S{1,120}: Connection to \S{1,80} \(at \S{1,80}\) was lost;",
        ),
    },
}

_NCCL = r"(?:\[[\d :.T-]{10,40}\] )?[\w.-]{1,255}:\d{1,10}:\d{1,10} \[\d{1,4}\] (?:[\w./-]{1,100}:\d{1,6} )?NCCL WARN "
_IB = _NCCL + "NET/IB ?: "
_COMPLETION = _IB + "Got completion from peer .{1,200} (?:with )?status="
_RETRY = r"IBV_WC_RETRY_EXC_ERR|12\b"
_ERROR_OF_JAX = r"(?:[\w.]{1,60}\.)?(?:Xla|Jax)RuntimeError: "  # the last line of a traceback
_GLOG = r"(?:[IWEF]\d{4} [\d:.]{8,15} {1,6}\d{1,10}|\d{4}-\d\d-\d\d [\d:.]{8,15}: [IWEF]) [\w./-]{1,120}:\d{1,6}\] "
_XLA = rf"(?:{_GLOG}|{_ERROR_OF_JAX})"
_COLLECTIVE = _XLA + "INTERNAL: .{0,200}"
_GLOO = rf"(?:{_XLA}.{{0,300}})?\[[\w./-]{{0,80}}gloo/transport/[^\]]{{1,60}}\] .{{0,120}}"
_OS_ERROR = r"(?:[\w.]{1,60}\.)?\w{0,30}Error: \[Errno "

# What libraries print; what ends the trainer itself is in its exit record. A lost peer is a consequence: the fault is
# that of the process that ended first.
_TRAINER: _Table = {
    (FaultClass.NETWORK, _ERROR): {
        "rdma-retry-exceeded": _COMPLETION + f"(?:{_RETRY})",  # RCCL net_ib.cc, NCCL net_ib/p2p.cc
        "rdma-error": _COMPLETION + f"(?!{_RETRY})",
        # RCCL misc/socket.cc, NCCL os/linux.cc
        "collective-timeout": _NCCL + ".{1,200}exceeded (?:timeouts|error retry count)",
        "collective-failed": _COLLECTIVE + r"unhandled system error \(run with NCCL_DEBUG",  # RCCL init.cc
    },
    (FaultClass.NETWORK, _WARNING): {  # RCCL net_ib.cc, NCCL net_ib/common.cc
        "rdma-event": _IB + r"\S{1,60} (?:Got )?(?:non-fatal )?async (?:fatal )?event",
    },
    (FaultClass.CRASH, _ERROR): {
        "collective-failed": _COLLECTIVE + r"unhandled cuda error \(run with NCCL_DEBUG",  # RCCL init.cc
        "check-failed": (_GLOG + "Check failed: ", _COLLECTIVE + r"RET_CHECK failure \("),  # abseil, XLA
        "gpu-page-fault": r"Memory access fault by GPU node-\d",  # ROCr runtime.cpp
        # ROCm clr rocdevice.cpp
        "gpu-exception": r":\d:rocdevice\.cpp {1,8}:.{1,300}callbackQueue aborting with error : HSA_STATUS_ERROR",
        "python-crash": "Fatal Python error: ",  # CPython faulthandler
    },
    (FaultClass.CRASH, _WARNING): {
        "peer-lost": (
            _COLLECTIVE + "remote process exited or there was a network error",  # RCCL init.cc
            _NCCL + ".{1,80}Connection closed by remote peer",  # RCCL misc/socket.cc
            _XLA + r".{0,300}(?:tasks are unhealthy \(stopped sending heartbeats\)"  # XLA coordination_service.cc
            r"|heartbeat timeout\. This indicates that the remote task"  # XLA distributed/client.h
            "|because the JAX distributed service detected fatal errors)",
            # Gloo tcp/pair.cc
            _GLOO + "(?:Connection (?:reset|closed) by|Socket (?:unexpectedly )?closed|Broken pipe)",
        ),
    },
    (FaultClass.HANG, _ERROR): {
        "collective-timeout": (
            r"(?:\[rank\d{1,6}\]: ?)?(?:\[E[^\]]{1,80}\] )?\[Rank \d{1,6}\] "  # PyTorch ProcessGroupNCCL.cpp
            "Watchdog caught collective operation timeout",
            _GLOG + r".{0,100}Termination timeout for `.{1,600} seconds exceeded\.",  # XLA rendezvous.cc
            # Gloo tcp/unbound_buffer.cc
            _GLOO + "(?:Timed out waiting|(?:Read|Write) timeout|Application timeout)",
        ),
        "barrier-timeout": _XLA + r".{0,200}Barrier timed out\. Id: ",  # XLA coordination_service.cc
        "traceback-timeout": r"Timeout \(\d{1,6}:\d\d:\d\d(?:\.\d{1,6})?\)!",  # CPython faulthandler
    },
    (FaultClass.HANG, _WARNING): {
        # XLA rendezvous.cc, coordination_service.cc
        "collective-stuck": _GLOG + r".{0,100}This thread has been waiting for `.{1,600} seconds and may be stuck\.",
        "deadline-exceeded": _ERROR_OF_JAX + r"DEADLINE_EXCEEDED: (?!Barrier timed out)",
    },
    (FaultClass.DEVICE_MEMORY, _ERROR): {  # XLA bfc_allocator
        "device-out-of-memory": _ERROR_OF_JAX
        + "RESOURCE_EXHAUSTED: (?!Received message).{0,300}(?:[Oo]ut of memory|allocat)",
    },
    (FaultClass.HOST_MEMORY, _ERROR): {
        "host-out-of-memory": (  # Slurm task_cgroup_memory.c, CPython
            r"slurmstepd: error: Detected \d{1,9} oom[_-]kill event",
            r"(?:numpy\.\S{1,60}\._Array)?MemoryError\b",
        ),
    },
    (FaultClass.DISK, _ERROR): {  # CPython, ENOSPC and EDQUOT; EIO
        "disk-full": _OS_ERROR + r"(?:28|122)\] ",
        "disk-io-error": _OS_ERROR + r"5\] ",
    },
}

_TABLES: dict[Source, _Table] = {"kernel": _KERNEL, "trainer": _TRAINER}
SIGNATURES: dict[Source, list[Signature]] = {
    source: [
        Signature(code, *kind, pattern)
        for kind, codes in table.items()
        for code, patterns in codes.items()
        for pattern in ((patterns,) if isinstance(patterns, str) else patterns)
    ]
    for source, table in _TABLES.items()
}
# NAME[PID]: the kernel's message about a program, which chooses its name of up to 15 bytes; some are escaped.
_ABOUT_PROGRAM = re.compile(r"(?:\\x[0-9a-f]{2}|.){0,15}\[\d{1,10}\]")
# The group that matches tells the signature. re.ASCII: digits of other scripts are text, not numbers.
_PATTERNS = {
    source: re.compile("|".join(f"({sign.pattern})" for sign in signatures), re.ASCII)
    for source, signatures in SIGNATURES.items()
}
