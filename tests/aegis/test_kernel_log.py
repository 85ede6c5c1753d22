"""New kernel messages arrive from the device and from files, bounded, and nothing that goes wrong raises."""

import contextlib
import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zaya_jax.aegis import kernel_log
from zaya_jax.aegis.kernel_log import DEVICE, KernelLog, parse_record
from zaya_jax.aegis.signatures import LONGEST_LINE


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


@pytest.fixture
def scripted(monkeypatch):
    """A device whose reads return the given records and raise the given errors, in order, and then EAGAIN."""

    def script(*steps: bytes | int) -> KernelLog:
        log, left = KernelLog(Path("/dev/null")), list(steps)
        fd = log._fd
        assert fd is not None
        real = os.read

        def read(descriptor: int, count: int) -> bytes:
            if descriptor != fd:
                return real(descriptor, count)
            step = left.pop(0) if left else errno.EAGAIN
            if isinstance(step, int):
                raise OSError(step, os.strerror(step))
            return step

        monkeypatch.setattr(kernel_log.os, "read", read)
        return log

    return script


def test_a_record_is_its_message():
    assert parse_record(b"3,901,1234567,-;NVRM: Xid (PCI:0000:3b:00): 79\n SUBSYSTEM=pci\n") == (
        "NVRM: Xid (PCI:0000:3b:00): 79"
    )
    assert parse_record(b"6,1,1,-,caller=T1;a;b\n") == "a;b"


@pytest.mark.parametrize(
    "record", [b"", b"\n", b"no head", b";text", b"x,1,1,-;text", b"-3,1,1,-;text", b"9" * 99 + b";x"]
)
def test_a_malformed_record_is_no_message(record):
    assert parse_record(record) == ""


def test_a_record_written_by_a_program_is_ignored():
    assert parse_record(b"12,5,99,-;NVRM: Xid (PCI:0000:3b:00): 79\n") == ""  # facility 1, user


@given(st.binary(max_size=4000))
def test_any_record_gives_one_bounded_line(data):
    for record in (data, b"6,1,1,-;" + data):
        message = parse_record(record)
        assert len(message) <= LONGEST_LINE
        assert "\n" not in message


def test_records_come_in_order_and_an_overrun_is_passed_over(scripted):
    log = scripted(b"6,1,1,-;one\n", errno.EPIPE, b"6,9,2,-;two\n")
    assert log.read() == ["one", "two"]
    assert log.read() == []
    assert log.problem == ""


def test_a_flood_of_records_is_bounded_per_call(scripted):
    log = scripted(*(b"6,1,1,-;%d\n" % number for number in range(2500)))
    counts = [len(log.read()) for _ in range(4)]
    assert counts == [1000, 1000, 500, 0]


def test_endless_overruns_end(scripted):
    log = scripted(*[errno.EPIPE] * 1500, b"6,1,1,-;text\n")
    assert [log.read(), log.read()] == [[], ["text"]]


def test_a_forbidden_log_says_so_and_is_never_read_again(scripted):
    log = scripted(errno.EPERM, b"6,1,1,-;text\n")
    assert log.read() == []
    assert "dmesg_restrict" in log.problem
    assert str(log.path) in log.problem
    assert log.read() == []


def test_a_log_that_cannot_be_opened_says_so(monkeypatch, tmp_path):
    path = tmp_path / "kmsg"
    path.write_text("")

    def refuse(*_):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(kernel_log.os, "open", refuse)
    log = KernelLog(path)
    assert "Operation not permitted" in log.problem
    assert log.read() == []


def test_only_what_is_appended_is_read(tmp_path):
    path = tmp_path / "dmesg"
    append(path, "old\n")
    log = KernelLog(path)
    assert log.read() == []
    append(path, "new 1\nnew 2\nhal")
    assert log.read() == ["new 1", "new 2"]
    append(path, "f\n")
    assert log.read() == ["half"]
    log.close()


def test_a_file_may_appear_be_emptied_and_be_rotated(tmp_path):
    path = tmp_path / "dmesg"
    log = KernelLog(path)
    assert (log.read(), log.problem) == ([], "")
    append(path, "first\n")
    assert log.read() == ["first"]
    path.write_text("x\n")  # emptied and shorter
    assert log.read() == ["x"]
    append(path, "last of the old\n")
    path.rename(tmp_path / "dmesg.1")
    append(path, "first of the new\n")
    assert log.read() + log.read() == ["last of the old", "first of the new"]
    path.unlink()
    assert log.read() == []
    log.close()


def test_a_large_file_is_read_in_bounded_pieces(tmp_path):
    path = tmp_path / "dmesg"
    path.write_text("")
    log = KernelLog(path)
    path.write_text("0123456789\n" * 200_000)
    first = log.read()
    assert 0 < sum(map(len, first)) <= 1 << 18
    log.close()


def test_the_middle_of_a_long_line_is_no_message(tmp_path):
    path = tmp_path / "kernel.log"
    path.touch()
    log = KernelLog(path)
    append(path, "x" * 2**17)
    assert [len(line) for line in log.read()] == [LONGEST_LINE]
    append(path, "NVRM: Xid (PCI:0000:3b:00): 79\nnext\n")
    assert log.read() == ["next"]


@pytest.mark.parametrize("kind", ["folder", "fifo"])
def test_another_kind_of_file_is_refused_without_waiting(tmp_path, kind):
    path = tmp_path / "log"
    path.mkdir() if kind == "folder" else os.mkfifo(path)
    log = KernelLog(path)
    assert "neither" in log.problem or "directory" in log.problem
    assert log.read() == []


def test_a_missing_device_is_a_problem():
    assert "No such file" in KernelLog(Path("/dev/no-such-kmsg")).problem


def test_the_device_of_this_machine_starts_at_its_end():
    log = KernelLog(DEVICE)
    with contextlib.closing(log):
        assert log.problem or log._is_device
        assert len(log.read()) < 100  # not the whole log since the machine started
