"""Every signature matches only its own sample, harmless lines match none, and no input is slow or unbounded."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.aegis.signature_samples import SAMPLES
from zaya_jax.aegis.failure import FaultClass, Severity
from zaya_jax.aegis.output import LineBuffer
from zaya_jax.aegis.signatures import LONGEST_LINE, SIGNATURES, observe_line

PREFIXES = [
    "", "[ 1234.567890] ", "[12345.678901][ T4242] ", "<3>[ 1234.567890] ", "[Fri Nov 27 06:00:00 2026] ",
    "kern  :err   : [ 1234.567890] ", "Nov 27 06:00:00 node7 kernel: ", "Nov  7 06:00:00 node7 kernel: [ 1234.567890] ",
    "2026-11-27T06:00:00.123456+00:00 node-7.cluster kernel: [ 1234.567890] ",
    "2026-11-27T06:00:00+0000 node7 kernel: ",
]  # fmt: skip
# What others than the kernel write to a log that merges all, and texts that quote a message.
QUOTES = [
    "Nov 27 06:00:00 node7 sshd[4242]: Invalid user {} from 203.0.113.7 port 22",
    "Nov 27 06:00:00 node7 sshd[4242]: {}",
    "Invalid user {}", "2026-11-27T06:00:00.123456+00:00 node7 app: {}", "Nov 27 06:00:00 node7 app[1]: kernel: {}",
    "audit: type=1300 comm=\"{}\"", "[app] {}", "message: {}", "  {}", "> {}", "'{}'", "kernel: {}",
]  # fmt: skip
HARMLESS = {
    "trainer": [
        "step 1234  loss 2.345  grad norm 0.87  lr 3.0e-04  812 k tokens/s",
        "I0926 17:26:32.075402  157988 service.cc:145] XLA service 0x55d5c0 initialized for platform ROCM",
        "W0926 bfc_allocator.cc:501] Allocator (GPU_0_bfc) ran out of memory trying to allocate 2.1GiB. The caller "
        "indicates that this is not a failure, but this may mean that there could be performance gains.",
        "node7:4242:4299 [0] NCCL INFO NET/IB : Using [0]ionic_0:1/RoCE [1]ionic_1:1/RoCE",
        'node7:4242:4299 [0] init.cc:1201 NCCL WARN Missing "iommu=pt" from kernel command line',
        "Resuming from step 250 of runs/tiny.",
        "The checkpoint of step 500 could not be saved: runs/tiny: No space left on device. Training continues; there "
        "is no checkpoint yet. Retrying in about 5 s.",
        "RESOURCE_EXHAUSTED: Received message larger than max (5243001 vs. 4194304)",
        "Stopped by SIGTERM. The newest checkpoint in runs/tiny is step 250: rerunning the command resumes from it.",
        "Thread is unstuck! Warning above was a false-positive. Perhaps the timeout is too short.",
        '  File "loop.py", line 12, in check  # raise MemoryError',
        "W1126 06:00:00.123456 157988 gemm_fusion_autotuner.cc:1045] autotuning candidate skipped: RESOURCE_EXHAUSTED: "
        "Out of memory while trying to allocate 8589934592 bytes.",
        "The disk answered: No space left on device",
        "Continuation of 'df': OSError: [Errno 28] No space left on device",
        "",
    ],
    "kernel": [
        "Linux version 6.8.0-45-generic (buildd@lcy02) (x86_64-linux-gnu-gcc-13)",
        "amdgpu 0000:0c:00.0: amdgpu: no uncorrectable hardware errors detected",
        "amdgpu 0000:0c:00.0: amdgpu: 0 uncorrectable hardware errors detected in umc block",
        "amdgpu 0000:0c:00.0: amdgpu: 7 uncorrectable hardware errors detected in total in umc block",
        "amdgpu 0000:0c:00.0: amdgpu: GPU reset succeeded, trying to resume",
        "NVRM: Xid (PCI:0000:5d:00): 154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)",
        "NVRM: loading NVIDIA UNIX x86_64 Kernel Module  570.124.06",
        "ionic 0000:b5:00.0: 126.016 Gb/s available PCIe bandwidth (8.0 GT/s PCIe x16 link)",
        "mlx5_core 0000:08:01.0: firmware version: 16.35.4506",
        "nvme nvme0: 32/0/0 default/read/poll queues",
        "EXT4-fs (nvme0n1p2): mounted filesystem with ordered data mode. Quota mode: none.",
        "XFS (dm-0): Ending clean mount",
        "pcieport 0000:00:1c.4: AER: enabled with IRQ 122",
        "nvidia-nvswitch0: open (major=510)",
        "EDAC MC0: Giving out device to module skx_edac controller Skylake Socket#0 IMC#0: DEV 0000:64:0a.0",
        "mce: [Hardware Error]: Machine check events logged",
        "{1}[Hardware Error]: event severity: corrected",
        "Lustre: Mounted capstor-client",
        "Lustre: capstor-OST003a-osc-ffff3000ef06c000: Connection restored to  (at 172.28.1.43@tcp)",
        "",
    ],
}


def code_of(source, line):
    seen = observe_line(source, line)
    return None if seen is None else seen.code


def test_every_pattern_matches_a_sample_and_every_sample_one_pattern():
    matched = set()
    for source, code, text in SAMPLES:
        signs = [sign for sign in SIGNATURES[source] if re.match(sign.pattern, text, re.ASCII)]
        assert [sign.code for sign in signs] == [code] == [code_of(source, text)], text
        matched.update(signs)
    assert matched == {sign for signs in SIGNATURES.values() for sign in signs}


@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_kernel_message_is_recognized_behind_the_prefix_of_each_log(prefix):
    for source, code, text in SAMPLES:
        if source == "kernel":
            assert code_of("kernel", prefix + text) == code, text


@pytest.mark.parametrize("quote", QUOTES)
def test_a_message_that_another_program_quotes_is_no_sign(quote):
    for source, _, text in SAMPLES:
        line = quote.format(text)
        assert code_of(source, line) is None, line


@pytest.mark.parametrize(
    "rest", ["[16460]: segfault at 0 ip 0000000000000000", "[1] bad frame in ] RAS poison consumption"]
)
def test_a_message_about_a_program_is_no_sign_whatever_its_name(rest):
    """Whoever can run a program chooses its name, of up to 15 bytes; the kernel escapes some."""
    starts = {text[:length] for source, _, text in SAMPLES if source == "kernel" for length in range(16)}
    starts |= {"EDAC MC0: 1 UE", "EDAC MC0: 1 CE", "a: Link down", "a1: Link is Up", "[drm", r"[drm" + r"\x01" * 11}
    for start in starts:
        assert code_of("kernel", start + rest) is None, start


@pytest.mark.parametrize("source", SIGNATURES)
def test_no_repetition_is_unbounded_or_nested_and_no_group_hides_a_signature(source):
    for sign in SIGNATURES[source]:
        assert not re.search(r"(?<!\\)[*+]", sign.pattern), sign
        assert not re.search(r"(?<!\\)\)\{", sign.pattern), sign
        assert re.compile(sign.pattern).groups == 0, sign
    for _, _, text in SAMPLES:
        for line in (text * LONGEST_LINE, text[:80] * LONGEST_LINE, text[:200].ljust(4096)):
            observe_line(source, line)


@pytest.mark.parametrize(("source", "line"), [(source, line) for source, lines in HARMLESS.items() for line in lines])
def test_harmless_lines_match_nothing(source, line):
    assert observe_line(source, line) is None


def test_codes_are_words_and_few_are_fatal():
    signs = [sign for signs in SIGNATURES.values() for sign in signs]
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)*", sign.code) for sign in signs)
    assert {sign.code for sign in signs if sign.severity is Severity.FATAL} == {"gpu-lost", "gpu-reset-failed"}
    assert {sign.fault for sign in signs} >= {FaultClass.GPU, FaultClass.NETWORK, FaultClass.DISK, FaultClass.HANG}


def test_each_source_has_its_own_signatures():
    lost = "NVRM: Xid (PCI:0000:02:00): 79, GPU has fallen off the bus."
    assert code_of("kernel", lost) == "gpu-lost"
    assert code_of("trainer", lost) is None


def test_only_the_start_of_a_long_line_counts():
    text = ".{} RET_CHECK failure ("
    start = "XlaRuntimeError: INTERNAL: "
    assert code_of("trainer", start + "x" * 200 + " RET_CHECK failure (") is None
    assert code_of("trainer", start + text) == "check-failed"
    assert observe_line("trainer", "x" * LONGEST_LINE + start + text) is None


@given(st.sampled_from(SAMPLES), st.text(max_size=200), st.text(max_size=200), st.integers(0, 7))
def test_text_around_a_sample_is_read_without_harm(sample, before, after, rank):
    seen = observe_line(sample[0], before + sample[2] + after, rank)
    assert seen is None or (len(seen.text) <= 500 and seen.text.isprintable() and seen.rank == rank)


@given(st.binary(max_size=5000), st.lists(st.integers(1, 700), max_size=20))
def test_any_bytes_in_any_pieces_give_the_same_lines(data, sizes):
    buffer, lines, start = LineBuffer(), b"", 0
    for size in sizes:
        lines += buffer.add(data[start : start + size])
        start += size
    lines += buffer.add(data[start:])
    assert lines == data[: data.rfind(b"\n") + 1]
    assert lines + buffer.partial == data
    for line in data.decode(errors="replace").splitlines():
        for source in ("trainer", "kernel"):
            if seen := observe_line(source, line):
                assert seen.text.isprintable()


def test_a_line_without_end_takes_little_memory():
    buffer, chunk = LineBuffer(), b"x" * 50_000
    passed = b""
    for _ in range(200):
        passed += buffer.add(chunk)
        assert len(buffer.partial) <= 2**16
    assert passed + buffer.add(b"\nnext") == chunk * 200 + b"\n"
    assert buffer.add(b"\n") == b"next\n"
