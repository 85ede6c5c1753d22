"""Every signature matches only its own sample, harmless lines match none, and no input is slow or unbounded."""

import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zaya_jax.aegis import signatures
from zaya_jax.aegis.observation import FaultClass, Severity
from zaya_jax.aegis.signatures import CATALOGUE, LONGEST_LINE, LineReader, match, observe_line

NAMES = [f"{sign.source}-{index}-{sign.code}" for index, sign in enumerate(CATALOGUE)]
HARMLESS = {
    "trainer": [
        "step 1234  loss 2.345  grad norm 0.87  lr 3.0e-04  812 k tokens/s",
        "I0926 17:26:32.075402  157988 service.cc:145] XLA service 0x55d5c0 initialized for platform ROCM",
        "W0926 bfc_allocator.cc:501] Allocator (GPU_0_bfc) ran out of memory trying to allocate 2.1GiB. The caller "
        "indicates that this is not a failure, but this may mean that there could be performance gains.",
        "node7:4242:4299 [0] NCCL INFO NET/IB : Using [0]ionic_0:1/RoCE [1]ionic_1:1/RoCE",
        "node7:4242:4299 [0] init.cc:1201 NCCL WARN Missing \"iommu=pt\" from kernel command line",
        "Resuming from step 250 of runs/tiny.",
        "RESOURCE_EXHAUSTED: Received message larger than max (5243001 vs. 4194304)",
        "Stopped by SIGTERM. The newest checkpoint in runs/tiny is step 250: rerunning the command resumes from it.",
        "Thread is unstuck! Warning above was a false-positive. Perhaps the timeout is too short.",
        "  File \"loop.py\", line 12, in check  # raise MemoryError",
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
        "",
    ],
}  # fmt: skip


@pytest.mark.parametrize("sign", CATALOGUE, ids=NAMES)
def test_a_sample_matches_its_own_signature_and_no_other_and_no_repetition_is_unbounded_or_nested(sign):
    assert match(sign.source, sign.sample) is sign
    assert [other for other in CATALOGUE if other.pattern.search(sign.sample)] == [sign]
    assert match(sign.source, f"[ 1234.567890] node7 kernel: {sign.sample}") is sign or sign.pattern.pattern[0] == "^"
    assert sign.literal in sign.sample  # and part of every match
    assert not sign.pattern.search(sign.sample.replace(sign.literal, "~"))
    pattern = sign.pattern.pattern
    assert not re.search(r"(?<!\\)[*+]", pattern)
    assert not re.search(r"(?<!\\)\)\{", pattern)
    worst = [sign.literal * LONGEST_LINE, sign.sample[:80] * LONGEST_LINE, sign.sample[:200].ljust(4096)]
    for line in worst:
        match(sign.source, line)


@pytest.mark.parametrize(("source", "line"), [(source, line) for source, lines in HARMLESS.items() for line in lines])
def test_harmless_lines_match_nothing(source, line):
    assert match(source, line) is None


def test_codes_are_words_and_few_are_fatal():
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)*", sign.code) and sign.origin for sign in CATALOGUE)
    fatal = {sign.code for sign in CATALOGUE if sign.severity is Severity.FATAL}
    assert fatal == {"gpu-lost", "gpu-reset-failed", "no-checkpoint"}
    assert {sign.fault for sign in CATALOGUE} >= {FaultClass.GPU, FaultClass.NETWORK, FaultClass.DISK, FaultClass.HANG}


def test_a_sentence_of_zaya_jax_outranks_the_system_error_that_it_quotes():
    line = ("The checkpoint of step 500 could not be saved: runs/tiny: No space left on device. Training continues; "
            "there is no checkpoint yet. Retrying in about 5 s.")  # fmt: skip
    sign = match("trainer", line)
    assert sign is not None
    assert (sign.code, sign.severity) == ("save-failed", Severity.WARNING)


def test_each_source_has_its_own_signatures():
    lost = "NVRM: Xid (PCI:0000:02:00): 79, GPU has fallen off the bus."
    assert match("kernel", lost)
    assert match("trainer", lost) is None


def test_only_the_start_of_a_long_line_counts():
    text = "No space left on device"
    assert match("trainer", "x" * (LONGEST_LINE - len(text)) + text)
    assert match("trainer", "x" * LONGEST_LINE + text) is None


def test_evidence_holds_the_match_as_one_printable_line():
    line = "x" * 900 + '\x1b[31m No space left on device\x00\n{"code": "fake"}'
    sign = match("trainer", line)
    assert sign is not None
    seen = sign.observe(line, rank=3)
    assert (seen.code, seen.rank) == ("disk-full", 3)
    assert "No space left on device" in seen.text
    assert seen.text.isprintable()


@given(st.sampled_from(CATALOGUE), st.text(max_size=200), st.text(max_size=200))
def test_text_around_a_sample_never_raises(sign, before, after):
    found = match(sign.source, before + sign.sample + after)
    assert found is None or found in CATALOGUE


def test_the_sources_are_those_of_the_catalogue():
    assert {sign.source for sign in CATALOGUE} == set(signatures._SEARCHES)


@given(st.binary(max_size=5000), st.integers(0, 7))
def test_any_bytes_are_read_without_harm(line, rank):
    for source in ("trainer", "kernel"):
        seen = observe_line(source, line, rank)
        assert seen is None or (len(seen.text) <= 500 and seen.text.isprintable() and seen.rank == rank)


@given(st.binary(max_size=5000), st.lists(st.integers(1, 700), max_size=20))
def test_any_bytes_in_any_pieces_give_the_same_bounded_lines(data, sizes):
    whole = LineReader()
    expected = whole.feed(data) + whole.flush()
    reader, lines, start = LineReader(), [], 0
    for size in sizes:
        lines += reader.feed(data[start : start + size])
        start += size
    lines += reader.feed(data[start:]) + reader.flush()
    assert lines == expected
    for line in lines:
        assert 0 < len(line) <= LONGEST_LINE
        assert not re.search(r"[\r\n]", line)
        for source in ("trainer", "kernel"):
            if sign := match(source, line):
                assert sign.observe(line).text.isprintable()


def test_a_line_without_end_keeps_its_start_only():
    reader = LineReader()
    chunk = random.Random(0).randbytes(1 << 16).replace(b"\n", b"").replace(b"\r", b"")
    for _ in range(200):
        assert reader.feed(chunk) == []
    assert len(reader._tail) == LONGEST_LINE
    [line] = reader.feed(b"\nnext")
    assert line == chunk[:LONGEST_LINE].decode("utf-8", "replace")
    assert reader.flush() == ["next"]
    assert reader.flush() == []


def test_progress_bars_and_blank_lines():
    assert LineReader().feed(b"  10%\r  20%\r\n\n \nend\n") == ["  10%", "  20%", "end"]
