"""A run folder whose file system does not answer stops neither the supervisor's watch nor its end."""

import os
import shutil
import subprocess
import time

import pytest

from tests.aegis.aegis_helpers import QUICK, left_running, supervise_light
from zaya_jax.aegis.exit_codes import SupervisorExit
from zaya_jax.aegis.file_worker import FileWorker


def supervise_silent(folder, *arguments, **options):
    return supervise_light(folder, *arguments, module="tests.aegis.silent_supervisor",
                           environment={"SILENT": str(folder / "silent")}, **options)  # fmt: skip


def silence(supervised, folder):
    """Make the next write of the supervisor wait, as for a server that is gone."""
    (folder / "silent").touch()
    while time.time() - (supervised.folder / "state.json").stat().st_mtime < 1.8:  # it is written every second
        assert supervised.process.poll() is None, supervised.said
        time.sleep(0.01)


def test_faults_are_dealt_with_while_the_folder_is_silent(tmp_path):
    supervised = supervise_silent(tmp_path, 350, "SIGKILL@200", "wait@250:1", processes=2, policy={"timeouts": QUICK})
    supervised.wait_for(supervised.folder / "state.json")
    silence(supervised, tmp_path)
    lines = len(supervised.events)
    supervised.wait_for(tmp_path / "checkpoint-0")
    assert supervised.wait() == SupervisorExit.DONE
    assert (tmp_path / "done-SIGKILL-200").exists()
    assert (tmp_path / "done-wait-250:1").exists()
    assert len(supervised.events) == lines  # nothing could be written
    assert "does not answer" in supervised.said
    assert not left_running(tmp_path)


def test_what_happened_is_written_once_the_folder_answers(tmp_path):
    supervised = supervise_silent(tmp_path, 300, "SIGKILL@200")
    supervised.wait_for(supervised.folder / "state.json")
    silence(supervised, tmp_path)
    supervised.wait_for(tmp_path / "done-SIGKILL-200")
    (tmp_path / "silent").unlink()
    assert supervised.wait() == SupervisorExit.DONE
    assert [event["code"] for event in supervised.kinds("end")] == ["signal-SIGKILL", "finished"]
    assert supervised.verdict["exit_code"] == 0


def test_a_request_to_stop_is_heeded_while_the_folder_is_silent(tmp_path):
    supervised = supervise_silent(tmp_path, 5000)
    supervised.wait_for(supervised.folder / "state.json")
    silence(supervised, tmp_path)
    supervised.process.terminate()
    assert supervised.wait() == SupervisorExit.PREEMPTED


def test_jobs_that_cannot_be_done_are_refused_not_kept():
    files = FileWorker()
    reader, writer = os.pipe()
    waiting = files.submit(lambda: os.read(reader, 1))
    results = [files.submit(lambda: None) for _ in range(10_100)]
    assert 90 <= sum(result.done() for result in results) <= 101
    assert files.silent_seconds > 0
    assert not files.finish(0.01)
    os.write(writer, b"x")
    assert waiting.result(5) == b"x"
    assert files.finish(5)
    with pytest.raises(OSError, match="does not answer"):
        results[-1].result()
    for file in (reader, writer):
        os.close(file)


@pytest.mark.soak
def test_a_frozen_file_system_keeps_no_supervisor_from_its_work(tmp_path):
    """A real one: its writers wait in the kernel, where no signal ends them, so the supervisor ends after the thaw."""
    image, folder, light = tmp_path / "image", tmp_path / "disk", tmp_path / "light"
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(2**26)
    commands = (["mkfs.ext4", "-q", str(image)], ["mount", "-o", "loop", str(image), str(folder)])
    if not shutil.which("fsfreeze") or any(subprocess.run(each, capture_output=True, check=False).returncode
                                           for each in commands):  # fmt: skip
        pytest.skip("file systems cannot be mounted or frozen here")
    try:
        supervised = supervise_light(light, 2000, "SIGKILL@700", flags=["--run-dir", str(folder / "run")])
        supervised.run_dir = folder / "run"
        supervised.wait_for(supervised.folder / "state.json")
        subprocess.run(["fsfreeze", "-f", str(folder)], check=True)
        try:
            supervised.wait_for(light / "done-SIGKILL-700", 60)
            step = int((light / "checkpoint-0").read_text())
            deadline = time.monotonic() + 20
            while int((light / "checkpoint-0").read_text()) <= step + 20:
                assert time.monotonic() < deadline, "not restarted"
                time.sleep(0.05)
            supervised.process.terminate()
            deadline = time.monotonic() + 20
            while "does not answer" not in supervised.said:
                assert time.monotonic() < deadline, supervised.said
                time.sleep(0.05)
        finally:
            subprocess.run(["fsfreeze", "-u", str(folder)], check=True)
        assert supervised.wait(20) == SupervisorExit.PREEMPTED
        assert not left_running(light)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
