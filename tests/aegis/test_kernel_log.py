"""The kernel's log is read from where it was opened, without waiting."""

from zaya_jax.aegis.kernel_log import KernelLog


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
