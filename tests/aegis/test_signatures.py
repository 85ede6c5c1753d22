"""Each signature knows its sample and no other line; what is no log is read without harm."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zaya_jax.aegis.kernel_log import KernelLog
from zaya_jax.aegis.observation import FaultClass, Severity
from zaya_jax.aegis.signatures import SIGNATURES, match_line, observe_line

HARMLESS = """
step 10/250 | loss 7.261 | 3.014 bits/byte | 2,631 tokens/s | 48.2 GFLOP/s | load entropy 0.456 | ETA 3:07
Resuming after step 28 of 50.
[Gloo] Rank 1 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1
amdgpu 0000:c1:00.0: amdgpu: RAS: optional ras ta ucode is not available
amdgpu 0000:c1:00.0: amdgpu: GPU reset(3) succeeded!
NVRM: loading NVIDIA UNIX x86_64 Kernel Module  560.35.03
NVRM: Xid (PCI:0000:65:00): 31, pid=4242, name=python, MMU Fault
usb 1-1: USB disconnect, device number 2
IPv6: ADDRCONF(NETDEV_CHANGE): veth1: link becomes ready
node7:4242:4300 [3] NCCL INFO NET/IB : Using [0]mlx5_0:1/RoCE
""".strip().splitlines()


@pytest.mark.parametrize("signature", SIGNATURES, ids=lambda signature: f"{signature.code}-{signature.word.decode()}")
def test_a_signature_knows_its_sample_and_no_other_does(signature):
    line = signature.sample.encode()
    assert [each for each in SIGNATURES if each.source == signature.source and each.pattern.search(line)] == [signature]
    assert match_line(signature.source, line) is signature
    assert match_line("trainer" if signature.source == "kernel" else "kernel", line) is None
    assert signature.word in line


@pytest.mark.parametrize("line", HARMLESS)
def test_harmless_lines_tell_nothing(line):
    assert match_line("trainer", line.encode()) is None
    assert match_line("kernel", line.encode()) is None


def test_codes_are_of_one_class():
    classes = {}
    for signature in SIGNATURES:
        assert classes.setdefault(signature.code, signature.fault) is signature.fault


@given(st.binary(max_size=5000), st.integers(0, 7))
def test_any_bytes_are_read_without_harm(line, rank):
    for source in ("trainer", "kernel"):
        seen = observe_line(source, line, rank)
        assert seen is None or (len(seen.text) <= 500 and seen.text.isprintable())


@given(st.sampled_from(SIGNATURES), st.text(alphabet="ab\x1b\n\r\x00", max_size=30))
def test_a_line_cannot_smuggle_control_characters_into_the_log(signature, noise):
    seen = observe_line(signature.source, (signature.sample + noise).encode(), 3)
    assert (seen.code, seen.rank) == (signature.code, 3)
    assert seen.text.isprintable()


def test_long_and_hostile_lines_cost_no_time():
    began = time.process_time()
    for filler in (b"x", b"Link ", b"amdgpu ", b"NVRM: Xid (", b"ring "):
        for _ in range(100):
            match_line("kernel", filler * 20_000)
    assert time.process_time() - began < 5


def test_the_kernel_log_has_what_is_written_after_it_was_opened(tmp_path):
    path = tmp_path / "dmesg"
    path.write_text("old\n")
    log = KernelLog(str(path))
    assert log.read() == []
    with path.open("a") as file:
        file.write("one\ntwo\nhal")
        file.flush()
        assert log.read() == [b"one", b"two"]
        file.write("f\n")
    assert log.read() == [b"half"]
    log.close()
    assert log.read() == []


def test_a_kernel_log_that_cannot_be_read_says_so(tmp_path):
    log = KernelLog(str(tmp_path / "missing"))
    assert "cannot be read: No such file" in log.problem
    assert log.read() == []


def test_the_device_is_read_where_it_may_be():
    log = KernelLog("/dev/kmsg")
    assert log.problem or isinstance(log.read(), list)
    log.close()


def test_only_uncorrectable_errors_end_a_run_by_themselves():
    severe = {
        each.code for each in SIGNATURES if each.fault is FaultClass.GPU and each.severity is not Severity.WARNING
    }
    assert severe == {"gpu-uncorrectable-ecc", "gpu-poison", "gpu-reset", "gpu-reset-failed", "gpu-ring-timeout",
                      "gpu-lost", "gpu-nvlink"}  # fmt: skip
