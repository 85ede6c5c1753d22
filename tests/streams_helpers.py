"""Commands with broken standard streams, in new processes or in forks of one that has imported all commands."""

import atexit
import contextlib
import gc
import importlib
import os
import pickle
import random
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.devices_helpers import ROOT

_SECONDS = 300  # after which a command hangs
_SERVER = "from tests.streams_helpers import serve; serve()"
_NOISE = random.Random(0).randbytes(3000) + b"\xff\n/reset\n\x80"  # no UTF-8
_IMPORTED = ("checkpoint.commands", "data.prepare", "evaluate.evaluate_command", "generate.chat",
             "lab.measure.installation", "aegis.report.page", "train.final_report", "weights.average",
             "weights.interop")  # fmt: skip


class Streams(NamedTuple):
    """What stdin, stdout and stderr are connected to.

    whole: random bytes, or a file; closed: nothing; gone: a pipe whose reader has ended; full: a full disk;
    failing: a file on storage that fails (`EIO`); unwritable: open for reading only.
    """

    stdin: str = "whole"
    stdout: str = "whole"
    stderr: str = "whole"
    encoding: str = "utf-8"


class Call(NamedTuple):
    """`python -m MODULE ARGUMENTS`."""

    module: str
    arguments: Sequence[str]
    streams: Streams = Streams()


class Outcome(NamedTuple):
    """How a command ended, and what it wrote to files."""

    status: int
    out: str
    err: str


def run(call: Call) -> Outcome:
    """Run a command in a new process."""
    with tempfile.TemporaryDirectory() as folder:
        descriptors = _open(call.streams, Path(folder))
        closed = [number for number, descriptor in enumerate(descriptors) if descriptor is None]
        with subprocess.Popen(
            [sys.executable, "-m", call.module, *call.arguments], cwd=ROOT, stdin=descriptors[0], stdout=descriptors[1],
            stderr=descriptors[2], env={**os.environ, "PYTHONIOENCODING": call.streams.encoding},
            preexec_fn=lambda: [os.close(number) for number in closed],  # noqa: PLW1509
        ) as process:  # fmt: skip
            _close(descriptors)
            try:
                status = process.wait(_SECONDS)
            finally:
                process.kill()
        return _outcome(status, Path(folder))


def run_forked(calls: Sequence[Call]) -> list[Outcome]:
    """Run commands one after the other, each in a fork of a process that has imported what takes long to import."""
    environment = {**os.environ, "GLIBC_TUNABLES": ""}  # or commands start anew for huge pages
    done = subprocess.run([sys.executable, "-c", _SERVER], input=pickle.dumps(calls), cwd=ROOT,
                          stdout=subprocess.PIPE, check=True, env=environment)  # fmt: skip
    return pickle.loads(done.stdout)  # noqa: S301 (written a moment ago)


def _open(streams: Streams, folder: Path) -> list[int | None]:
    (folder / "stdin").write_bytes(_NOISE)
    descriptors = []
    for name, kind in zip(Streams._fields, streams[:3], strict=False):
        writer = None
        if kind == "gone":
            reader, writer = os.pipe()
            os.close(reader)
        elif kind != "closed":
            path = {"whole": folder / name, "failing": Path("/proc/self/mem")}.get(kind, Path("/dev/full"))
            mode = os.O_RDONLY if name == "stdin" or kind == "unwritable" else os.O_WRONLY
            writer = os.open(path, mode | (os.O_CREAT | os.O_APPEND if kind == "whole" else 0))
        descriptors.append(writer)
    return descriptors


def _close(descriptors: Sequence[int | None]) -> None:
    for descriptor in descriptors:
        if descriptor is not None:
            os.close(descriptor)


def _outcome(status: int, folder: Path) -> Outcome:
    out, err = (path.read_text(errors="replace") if path.exists() else ""
                for path in (folder / "stdout", folder / "stderr"))  # fmt: skip
    return Outcome(status, out, err)


def _fork(call: Call) -> Outcome:
    folder = Path(tempfile.mkdtemp())  # a `TemporaryDirectory` would be removed when the child ends
    child = os.fork()
    if child == 0:
        status = 99
        try:
            status = _become(call, folder)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    outcome = _outcome(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), folder)
    shutil.rmtree(folder)
    return outcome


def _become(call: Call, folder: Path) -> int:
    """Do what the interpreter does with the streams, the module and the exit status of a new process."""
    signal.alarm(_SECONDS)
    for number, descriptor in enumerate(_open(call.streams, folder)):
        os.close(number)
        if descriptor is not None:
            os.dup2(descriptor, number)
            os.close(descriptor)
    for number, name in enumerate(Streams._fields[:3]):
        stream = None
        with contextlib.suppress(OSError):
            stream = open(number, "w" if number else "r", -1 if number < 2 else 1, call.streams.encoding,  # noqa: SIM115
                          "backslashreplace" if number == 2 else "strict", closefd=False)  # fmt: skip
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.argv[1:] = call.arguments
    home = call.module if call.module == "zaya_jax.main" else f"{call.module}.__main__"
    sys.modules.pop(home, None)
    status = 0
    try:
        runpy.run_module(call.module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0
    except BaseException:
        traceback.print_exc()
        status = 1
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        status = 120  # as the interpreter has it
    return status


def serve() -> None:
    """Read calls from stdin, run them, and write their outcomes to stdout."""
    calls = pickle.load(sys.stdin.buffer)  # noqa: S301 (of the test)
    answers = os.dup(1)
    for name in _IMPORTED:
        importlib.import_module(f"zaya_jax.{name}")
    warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)  # jax: no backend has started yet
    gc.freeze()
    gc.disable()  # or each fork copies what is only looked at
    outcomes = [_fork(call) for call in calls]
    with open(answers, "wb") as file:
        pickle.dump(outcomes, file)
