"""Preparations that are killed, at any moment, come out byte for byte as one that was not."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.data.prepare_helpers import QUARTER, ROOT, check_nothing_else, contents, count_notes, make_texts, write_jsonl
from zaya_jax.data.prepare.preparation import open_manifest, prepare
from zaya_jax.data.readers.inputs import list_units
from zaya_jax.errors import InputError

# The command with small units: prepare INPUT TOKENIZER OUTPUT UNIT_BYTES WORKERS. The first worker that has finished a
# unit stops all processes; each of them runs what precedes `if`.
DRIVER = """
import os, signal, sys
from pathlib import Path
from zaya_jax.data.prepare import shard_conversion as convert
from zaya_jax.data.prepare.preparation import PrepareSettings, prepare

def write_and_stop(path, content):
    write(path, content)
    if path.suffix != ".json":  # the note, which is the last file of a unit
        return
    try:
        Path(__file__).with_name("stopped").touch(exist_ok=False)
    except FileExistsError:
        return
    os.killpg(os.getpgrp(), signal.SIGSTOP)

write, convert.write_atomically = convert.write_atomically, write_and_stop
if __name__ == "__main__":
    documents, tokenizer, output, unit_bytes, workers = sys.argv[1:]
    prepare([documents], Path(tokenizer), Path(output), PrepareSettings(heldout=0.25), unit_bytes=int(unit_bytes),
            workers=int(workers))
"""

# Kills a process at each of the moments at which it is about to open, rename or remove a file of its folder, and runs
# the same again. Prints the moments after which the folder is not what it should be, and then how many there are.
SWEEP = """
import json, os, random, shutil, signal, sys
from pathlib import Path
from zaya_jax.data.prepare.preparation import PrepareSettings, merge, prepare

documents, tokenizer, good, output = map(Path, sys.argv[1:5])
unit_bytes, tasks, part = int(sys.argv[5]), int(sys.argv[6]), float(sys.argv[7])

def work():
    for task in range(tasks):
        prepare([str(documents)], tokenizer, output, PrepareSettings(heldout=0.25), unit_bytes=unit_bytes, workers=1,
                task=task, tasks=tasks)
    merge(output)

def run(moment):
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    seen = 0

    def hook(event, arguments):
        nonlocal seen
        if event in ("open", "os.rename", "os.remove", "os.mkdir") and str(arguments[0]).startswith(str(output)):
            seen += 1
            if seen == moment:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    work()
    json.dump(seen, open(output.with_name("seen"), "w"))
    os._exit(0)

def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}

run(0)
total, wrong, expected = json.load(open(output.with_name("seen"))), [], contents(good)
assert contents(output) == expected
every = range(1, total + 1)
moments = {*random.Random(0).sample(every, int(part * total)), *random.Random(1).sample(every[-16:], int(part * 16))}
for moment in sorted(moments):
    shutil.rmtree(output)
    status = run(moment)
    assert os.WTERMSIG(status) == signal.SIGKILL, (moment, status)
    output.mkdir(exist_ok=True)
    status = run(0)
    assert status == 0, (moment, status)
    if contents(output) != expected:
        wrong.append((moment, sorted(set(contents(output)) ^ set(expected))))
print(json.dumps({"wrong": wrong, "moments": len(moments)}))
"""


class Command:
    """The command in a process of its own, which is killed alone: what it started must end by itself."""

    def __init__(self, documents, tokenizer, output, unit_bytes, workers):
        arguments = [str(argument) for argument in (documents, tokenizer, output, unit_bytes, workers)]
        script = output.with_name("driver.py")
        script.write_text(DRIVER)
        self.process = subprocess.Popen(
            [sys.executable, script, *arguments], env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip

    def wait_until_stopped(self):
        """Wait until a unit is finished and all processes have stopped."""
        while set(self.living()) != {psutil.STATUS_STOPPED}:
            assert self.process.poll() is None
            time.sleep(0.001)

    def kill(self):
        """Kill the process, see that those it started end too, and return its exit status."""
        self.process.kill()
        status = self.process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGCONT)
        until = time.monotonic() + 60  # they look several times a second
        while self.living() and time.monotonic() < until:
            time.sleep(0.02)
        assert self.living() == []
        return status

    def living(self):
        """The states of the command's processes that live."""
        states = []
        for pid in psutil.pids():
            with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
                if os.getsid(pid) == self.process.pid:
                    states.append(psutil.Process(pid).status())
        return [state for state in states if state != psutil.STATUS_ZOMBIE]


def test_a_kill_in_the_middle_changes_no_byte_and_two_calls_at_once_are_refused(tmp_path, tokenizer):
    texts_file, unit_bytes, output = write_jsonl(tmp_path / "in.jsonl", make_texts(400)), 900, tmp_path / "out"
    units = len(list_units([str(texts_file)], unit_bytes=unit_bytes))
    command = Command(texts_file, tokenizer, output, unit_bytes, 2)
    command.wait_until_stopped()
    assert 0 < count_notes(output) < units
    with pytest.raises(InputError, match=rf"^--output \({output}\) is in use by another process"):
        prepare([str(texts_file)], tokenizer, output, QUARTER, unit_bytes=unit_bytes, workers=1)
    assert command.kill() == -signal.SIGKILL
    with pytest.raises(InputError, match=r"is incomplete; rerun the prepare command to finish it\.$"):
        open_manifest(output)
    for folder in (output, tmp_path / "good"):
        prepare([str(texts_file)], tokenizer, folder, QUARTER, unit_bytes=unit_bytes, workers=1)
    assert contents(output) == contents(tmp_path / "good")
    check_nothing_else(output)


def check_every_moment(folder, tokenizer, texts_file, *, unit_bytes, tasks, part):
    prepare([str(texts_file)], tokenizer, folder / "good", QUARTER, unit_bytes=unit_bytes, workers=1)
    done = subprocess.run(
        [sys.executable, "-c", SWEEP, texts_file, tokenizer, folder / "good", folder / "out", str(unit_bytes),
         str(tasks), str(part)],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["wrong"] == []
    return result["moments"]


def test_a_kill_before_any_change_of_a_file_changes_no_byte(tmp_path, tokenizer):
    texts_file = write_jsonl(tmp_path / "in.jsonl", make_texts(12))
    assert check_every_moment(tmp_path, tokenizer, texts_file, unit_bytes=900, tasks=1, part=0.3) >= 15
