import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from zaya_jax.data.readers.inputs import list_units
from zaya_jax.data.tokenizer import tokenizer_path
from zaya_jax.errors import InputError, Reason
from zaya_jax.run.files import hub_hint, json_text, locked, read_json, read_text, require_existing, write_atomically

ROOT = Path(__file__).parent.parent.parent
HOLDER = """
import sys, time
from pathlib import Path
from zaya_jax.run.files import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""
# Writes the same file over and over: 200 kB of the letter a, then of b, and so on.
WRITER = """
import itertools, sys
from pathlib import Path
from zaya_jax.run.files import write_atomically
print("begun", flush=True)
for letter in itertools.cycle("abcdefgh"):
    write_atomically(Path(sys.argv[1]), letter * 200_000)
"""


@pytest.fixture
def begin():
    """Start a Python process and wait until it has said a word; it is killed in the end."""
    processes = []

    def start(code, *arguments):
        command = [sys.executable, "-c", code, *map(str, arguments)]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
        processes.append(process)
        process.stdout.readline()
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_a_file_is_written_whole_and_nothing_else_is_left(tmp_path):
    path = tmp_path / "a.json"
    write_atomically(path, "old ☃\n")
    write_atomically(path, "new ☃\n")
    assert path.read_bytes() == "new ☃\n".encode()
    assert list(tmp_path.iterdir()) == [path]


def test_bytes_of_a_path_that_are_no_text_become_escapes_which_json_reads(tmp_path):
    path = {"path": "a\udcff"}
    write_atomically(tmp_path / "a.json", json_text(path))
    assert (tmp_path / "a.json").read_bytes().isascii()
    assert read_json(tmp_path / "a.json") == path


@pytest.mark.parametrize(("make", "message"), [
    (Path.mkdir, "cannot be read: Is a directory."),
    (lambda path: path.write_bytes(b"ab\xff"), "cannot be read: the byte at offset 2 is not UTF-8."),
    (lambda path: path.symlink_to(path), "cannot be read: Too many levels of symbolic links."),
])  # fmt: skip
def test_a_text_that_cannot_be_read_is_named_with_its_flag_and_the_reason(tmp_path, make, message):
    make(tmp_path / "text")
    with pytest.raises(InputError) as refused:
        read_text(str(tmp_path / "text"), "--file")
    assert str(refused.value) == f"--file {tmp_path / 'text'} {message}"


def test_a_file_that_cannot_be_written_stays_as_it_was(tmp_path):
    path = tmp_path / "a.json"
    write_atomically(path, "old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            write_atomically(path, "x" * 100_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_text() == "old"
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        write_atomically(tmp_path / "folder", "text")
    assert sorted(tmp_path.iterdir()) == [path, tmp_path / "folder"]


def test_json_that_cannot_be_read_is_named(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"a": [1]}')
    assert read_json(path) == {"a": [1]}
    for content, said in ((b"{", "is not JSON"), (b"[" * 10**6, "is not JSON"), (b"\xff", "is not JSON"),
                          (b"1" * 5000, "is not JSON"), (b" " * 2**26 + b"1", "is larger than")):  # fmt: skip
        path.write_bytes(content)
        with pytest.raises(InputError, match=rf"a\.json {said}"):
            read_json(path)
    path.unlink()
    with pytest.raises(InputError, match=r"a\.json cannot be read: No such file"):
        read_json(path)
    os.mkfifo(path)
    with pytest.raises(InputError, match=r"a\.json cannot be read: it is a pipe or a device"):
        read_json(path)


@pytest.mark.parametrize(("missing", "meant"), [
    ("runs/tinny", "runs/tiny"), ("run/tiny", "runs/tiny"), ("runs/xyzzy", ""), ("runs/tinny/none", ""),
    ("runs/tiny/config.yml", "runs/tiny/config.yaml"), ("x/y/z", ""),
])  # fmt: skip
def test_a_missing_path_is_named_with_the_one_that_was_meant(tmp_path, monkeypatch, missing, meant):
    (tmp_path / "runs" / "tiny").mkdir(parents=True)
    (tmp_path / "runs" / "tiny" / "config.yaml").touch()
    monkeypatch.chdir(tmp_path)
    for folder in (Path(), tmp_path):
        require_existing(folder / "runs" / "tiny", "It")
        with pytest.raises(InputError) as caught:
            require_existing(folder / missing, "It")
        inside = "" if folder.is_absolute() else f" Relative paths start in {tmp_path}."
        assert str(caught.value) == "It does not exist." + (f" Did you mean {folder / meant}?" if meant else inside)


def test_what_is_named_as_on_the_hub_gets_the_command_that_downloads_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    model = "run hf download Zyphra/ZAYA1-8B --local-dir models/ZAYA1-8B, and"
    data = "run hf download --repo-type dataset org/web.v2 --local-dir data/web.v2, and"
    with pytest.raises(InputError, match=f"^It does not exist. If it is a model .*{model} name that folder.$"):
        require_existing(Path("Zyphra/ZAYA1-8B"), "It")
    with pytest.raises(InputError, match=rf"^--tokenizer is 'Zyphra/ZAYA1-8B', but must .*{model}"):
        tokenizer_path("Zyphra/ZAYA1-8B")
    with pytest.raises(InputError, match=rf"^The input org/web\.v2 does not exist\. If it is a data set .*{data}"):
        list_units(["org/web.v2"])
    for path in ("runs/tiny", "mine/tiny", "a/b/c", "/a/b", "../b", "a/..", "a b/c", "-a", "a/b;c", "tiny"):
        assert hub_hint(path) == "", path


def test_a_reader_and_a_kill_see_a_whole_file(tmp_path, begin):
    path = tmp_path / "a.json"
    writer = begin(WRITER, path)
    while not path.exists():
        assert writer.poll() is None
        time.sleep(0.001)
    seen = set()
    while len(seen) < 8:  # so many letters were written meanwhile
        assert writer.poll() is None
        text = path.read_text()
        assert text == text[0] * 200_000
        seen.add(text[0])
    writer.kill()
    assert writer.wait() == -signal.SIGKILL
    text = path.read_text()
    assert text == text[0] * 200_000


def test_a_lock_that_another_process_holds_is_refused_until_that_process_is_killed(tmp_path, begin):
    path = tmp_path / "deep" / "below" / ".lock"
    holder = begin(HOLDER, path)
    with pytest.raises(InputError, match=rf"^The folder \({path.parent}\) is in use by another process") as refused:
        locked(path, wait=False).__enter__()
    assert refused.value.reason is Reason.PEERS_MISSING  # a supervisor tries again
    holder.kill()
    holder.wait()
    with locked(path, wait=False):
        pass


def test_a_lock_is_waited_for_until_the_other_process_ends(tmp_path, begin):
    path = tmp_path / ".lock"
    holder = begin(HOLDER, path)
    released = []

    def end():
        time.sleep(0.3)
        released.append(True)
        holder.kill()

    thread = threading.Thread(target=end)
    thread.start()
    with locked(path):
        assert released == [True]
    thread.join()


def test_a_lock_excludes_within_one_process_and_is_let_go_by_an_exception(tmp_path):
    path = tmp_path / ".lock"

    def fail():
        with pytest.raises(InputError, match="another process"):
            locked(path, wait=False).__enter__()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), locked(path):
        fail()
    with locked(path, wait=False), pytest.raises(InputError, match="another process"):
        locked(path, wait=False).__enter__()


def test_a_lock_whose_file_its_owner_removed_is_taken_anew(tmp_path):
    path, waiting, seen = tmp_path / ".lock", threading.Event(), []

    def wait():
        waiting.set()
        with locked(path):
            with pytest.raises(InputError, match="another process"):  # for the others too it is the one
                locked(path, wait=False).__enter__()
            seen.append(path.exists())

    with locked(path):
        thread = threading.Thread(target=wait)
        thread.start()
        waiting.wait()
        time.sleep(0.1)
        assert seen == []
        path.unlink()
    thread.join()
    assert seen == [True]


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").write_text("text")
    below = tmp_path / "file" / "below"
    with pytest.raises(InputError, match=rf"^The cache \({below}\) cannot be written: Not a directory\.$"):
        locked(below / ".lock", "The cache").__enter__()
