"""A host that runs out of disk or memory is reported once per level; control groups of both versions are read."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zaya_jax.aegis import monitor
from zaya_jax.aegis.failure import FaultClass, Severity
from zaya_jax.aegis.monitor import HostWatch

DISK, MEMORY = (100, 10), (0.1, 0.05)  # limits of warnings and errors


class Host:
    """Free disk and memory, and the cgroup files, that the tests set."""

    def __init__(self, folder: Path) -> None:
        self.free, self.available, self.folder = 1000.0, 50, folder
        self.root, self.own = folder / "cgroup", folder / "own"
        self.root.mkdir()
        self.own.write_text("")

    def watch(self, run_dir: Path | None = None) -> HostWatch:
        return HostWatch(run_dir or self.folder, self.root, self.own)

    def disk_usage(self, folder: Path) -> SimpleNamespace:
        assert folder.exists()
        if self.free < 0:
            raise OSError(5, "Input/output error")
        return SimpleNamespace(free=self.free)


@pytest.fixture
def fake(tmp_path, monkeypatch):
    fake = Host(tmp_path)
    monkeypatch.setattr(monitor, "_DISK", DISK)
    monkeypatch.setattr(monitor, "_MEMORY", MEMORY)
    monkeypatch.setattr(monitor.shutil, "disk_usage", fake.disk_usage)
    monkeypatch.setattr(monitor.psutil, "virtual_memory", lambda: SimpleNamespace(available=fake.available, total=100))
    return fake


def codes(seen):
    return [(observation.code, observation.severity) for observation in seen]


def test_a_healthy_host_is_silent(fake):
    watch = fake.watch()
    assert [watch.poll() + watch.poll_disk() for _ in range(3)] == [[]] * 3


def test_a_disk_that_fills_is_told_once_per_level(fake):
    watch, told = fake.watch(), []
    for fake.free in (150, 100, 99, 50, 101, 99, 9, 8, 10.5, 9, 50, 50, 9, 500, 500):
        told += codes(watch.poll_disk())
    low, error = ("disk-low", Severity.WARNING), ("disk-low", Severity.ERROR)
    assert told == [low, error, error, ("disk-recovered", Severity.INFO)]


def test_evidence_names_the_folder_and_the_free_space(fake):
    fake.free = 5e-9 * 1e9
    [seen] = fake.watch().poll_disk()
    assert str(fake.folder) in seen.text
    assert "GB free" in seen.text
    assert seen.fault is FaultClass.DISK


def test_a_run_folder_that_does_not_exist_yet_uses_its_parent(fake):
    fake.free = 5
    [seen] = fake.watch(fake.folder / "runs" / "new").poll_disk()
    assert str(fake.folder) in seen.text


def test_a_file_system_that_cannot_be_read_is_told_once(fake):
    watch, fake.free = fake.watch(), -1
    assert codes(watch.poll_disk() + watch.poll_disk()) == [("disk-unreadable", Severity.ERROR)]
    fake.free = 1000
    assert codes(watch.poll_disk()) == [("disk-recovered", Severity.INFO)]


def test_memory_that_runs_out_is_told_once_per_level(fake):
    watch, told = fake.watch(), []
    for fake.available in (15, 9, 9, 4, 4, 50):
        told += codes(watch.poll())
    assert told == [
        ("memory-low", Severity.WARNING), ("memory-low", Severity.ERROR), ("memory-recovered", Severity.INFO)
    ]  # fmt: skip


V2 = ("0::/job/step\n", "job/step/memory.events", "low 0\nhigh 0\nmax 9\noom 3\noom_kill %d\noom_group_kill 0\n")
V2_ROOT = ("0::/\n", "memory.events", "oom_kill %d\n")
V2_NAMESPACE = ("0::/../host/job\n0::/inner\n", "memory.events", "oom_kill %d\n")
V1 = ("9:cpu,cpuacct:/job\n4:memory:/job\n0::/\n", "memory/job/memory.oom_control", "under_oom 0\noom_kill %d\n")
V1_CONTAINER = ("4:memory:/docker/0123\n", "memory/memory.oom_control", "oom_kill_disable 0\noom_kill %d\n")


@pytest.mark.parametrize(("own", "file", "text"), [V2, V2_ROOT, V2_NAMESPACE, V1, V1_CONTAINER])
def test_processes_killed_for_memory_are_counted(fake, own, file, text):
    path = fake.root / file
    path.parent.mkdir(parents=True, exist_ok=True)
    fake.own.write_text(own)
    path.write_text(text % 2)
    watch = fake.watch()
    assert watch.poll() == []  # killed before the run
    path.write_text(text % 3)
    [one] = watch.poll()
    assert (one.code, one.severity, one.fault) == ("host-out-of-memory", Severity.ERROR, FaultClass.HOST_MEMORY)
    assert "1 process of" in one.text
    path.write_text(text % 5)
    assert "2 processes of" in watch.poll()[0].text
    path.unlink()
    assert watch.poll() == []
    path.write_text(text % 6)
    assert len(watch.poll()) == 1


def test_a_group_outside_of_the_mount_is_not_read(fake):
    (fake.folder / "memory.events").write_text("oom_kill 1\n")
    fake.own.write_text("0::/../\n")
    watch = fake.watch()
    (fake.folder / "memory.events").write_text("oom_kill 9\n")
    assert watch.poll() == []


def test_a_pipe_in_place_of_a_file_does_not_block(fake):
    fake.own.write_text("0::/\n")
    os.mkfifo(fake.root / "memory.events")
    assert fake.watch().poll() == []


@given(own=st.binary(max_size=200), events=st.binary(max_size=200))
def test_no_content_of_the_files_raises(tmp_path_factory, own, events):
    folder = tmp_path_factory.mktemp("host")
    (folder / "own").write_bytes(own.replace(b"\0", b""))
    (folder / "memory.events").write_bytes(events)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(monitor, "_MEMORY", (0, 0))
        assert HostWatch(folder, folder, folder / "own").poll() == []


def test_this_machine_can_be_read(tmp_path):
    watch = HostWatch(tmp_path)
    assert all(observation.text for observation in [*watch.poll(), *watch.poll_disk()])
