"""The sentence that ends a command which lacks a resource, or runs under a setting that it cannot have."""

import copy
import errno
import os
import re
import resource
import subprocess
import sys

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.train_helpers import ROOT, STEP, make_program, write_corpus
from zaya_jax.config.stages import stages
from zaya_jax.data.tokenizer import train_tokenizer
from zaya_jax.errors import (
    ExitCode,
    InputError,
    PeersMissing,
    Reason,
    RunStopped,
    exit_message,
    exit_reason,
    is_expected,
)


def raised(error: BaseException) -> BaseException:
    """The error as it is caught."""
    try:
        raise error
    except BaseException as caught:
        return caught


@pytest.mark.parametrize(("setting", "value"), [("rank", "raise"), ("dtype", "strict")])
def test_a_setting_under_which_no_step_can_be_traced_is_named(monkeypatch, setting, value):
    name = f"numpy_{setting}_promotion"
    program = make_program(STEP)
    stage, state = stages(STEP)[0], program.abstract_state  # traced before
    monkeypatch.setenv(f"JAX_{name}".upper(), value)
    with getattr(jax, name)(value), pytest.raises((ValueError, TypeError)) as refused:
        program.trace(stage)
    assert state is program.abstract_state
    assert is_expected(refused.value)
    sentence, status = exit_message(refused.value)
    assert sentence.startswith(f"Error: JAX_{name.upper()} is {value!r}, with which zaya_jax does not run; unset it. ")
    assert status == ExitCode.BAD_INPUT


@pytest.mark.parametrize(("variable", "value", "message"), [
    ("JAX_ENABLE_X64", "perhaps", "Error: JAX_ENABLE_X64 is 'perhaps', with which zaya_jax does not run; unset it."),
    ("JAX_PLATFORMS", "abacus", "Error: JAX_PLATFORMS is 'abacus', but jax cannot use it."),
    ("JAX_DISABLE_JIT", "1", "Error: JAX_DISABLE_JIT is '1', with which zaya_jax does not run; unset it."),
])  # fmt: skip
def test_a_variable_that_jax_refuses_is_named(variable, value, message):
    code = """if True:
        from zaya_jax.run.command_output import run_command
        def run():
            import jax
            jax.jit(abs).trace(1).lower().compile()(1)
        raise SystemExit(run_command(run))
    """
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False,
                          env={**os.environ, variable: value})  # fmt: skip
    assert done.stderr.startswith(message), done.stderr
    assert done.stderr.count("\n") == 1
    assert done.returncode == ExitCode.BAD_INPUT


@given(st.sampled_from([RuntimeError, TypeError, ValueError, AssertionError, KeyError]), st.text(),
       st.sampled_from(["", "jax_debug_nans", "no platforms", "jax_numpy_dtype_promotion"]))  # fmt: skip
def test_a_defect_is_not_taken_for_a_setting_that_is_not_set(kind, text, more):
    with pytest.MonkeyPatch.context() as patch:
        for name in ("JAX_DEBUG_NANS", "JAX_NUMPY_DTYPE_PROMOTION"):
            patch.delenv(name, raising=False)
        assert not is_expected(raised(kind(f"{text} {more}")))
        for ours in (InputError, RunStopped):
            assert exit_message(raised(ours(more)))[0].endswith(f": {more}")


def limited(kind: int, limit: int, *command: str) -> str:
    """What a command says at its end whose processes have a limit; it ends with status 1 and without a traceback."""
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False,
                          preexec_fn=lambda: resource.setrlimit(kind, (limit, limit)))  # fmt: skip
    assert "Traceback" not in done.stderr
    assert done.returncode == ExitCode.STOPPED
    return done.stderr.splitlines()[-1]


@pytest.mark.parametrize(("kind", "limit", "message"), [
    (resource.RLIMIT_NOFILE, 6, r"Too many open files\. Raise the limit of this process \(ulimit -n\)\."),
    (resource.RLIMIT_FSIZE, 1000, r"File too large\. Raise the limit of file sizes \(ulimit -f\)\."),
])  # fmt: skip
def test_a_limit_that_is_reached_is_named_with_what_to_change(tmp_path, kind, limit, message):
    texts = [path.read_text() for path in write_corpus(tmp_path / "corpus").iterdir()]
    train_tokenizer(texts, 300).save(tmp_path / "tokenizer.json")
    last = limited(kind, limit, "zaya_jax.data", "prepare", "--input", str(tmp_path / "corpus"), "--suffixes", ".txt",
                   "--tokenizer", str(tmp_path / "tokenizer.json"), "--output", str(tmp_path / "out"),
                   "--workers", "1")  # fmt: skip
    assert re.fullmatch(rf"Stopped: (\S+: )?{message}", last), last


@pytest.mark.parametrize(("limit", "spare", "action", "message"), [
    ("RLIMIT_AS", 2**25, "import jax", r"\S+: failed to map segment from shared object\. .*\(ulimit -v, a cgroup\).*"),
    ("RLIMIT_AS", 2**25, "bytearray(2**30)", r"Cannot allocate memory\. .*\(ulimit -v, a cgroup\).*"),
    ("RLIMIT_NOFILE", 2, "asyncio.run(asyncio.sleep(0))", r"Too many open files\. .*\(ulimit -n\)\."),
])  # fmt: skip
def test_a_library_that_reaches_a_limit_ends_a_command_with_one_line(limit, spare, action, message):
    code = f"""if True:
        import asyncio, os, resource, numpy
        from zaya_jax.run.command_output import prepare_streams, run_command
        prepare_streams()
        def run():
            used = {{"RLIMIT_AS": int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize(),
                    "RLIMIT_NOFILE": max(map(int, os.listdir("/proc/self/fd")))}}["{limit}"]
            resource.setrlimit(resource.{limit}, (used + {spare},) * 2)
            {action}
        raise SystemExit(run_command(run))
    """
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert re.fullmatch(f"Stopped: {message}\n", done.stderr), done.stderr
    assert done.returncode == ExitCode.STOPPED


@given(st.sampled_from([ValueError, RuntimeError, ImportError]), st.text(max_size=400),
       st.sampled_from(["File too large", "Too many open files", "can't start new thread"]), st.booleans())  # fmt: skip
def test_a_limit_is_named_whatever_a_library_says_around_it_or_raises_from_it(kind, text, limit, is_cause):
    error = kind(text if is_cause else f"{text}: {limit} [tensorstore_spec='{{}}']")
    error.__cause__ = RuntimeError(limit) if is_cause else None
    assert is_expected(error)
    sentence, status = exit_message(error)
    assert re.search(r"Raise the limit .*\(ulimit -[fnu]", sentence)
    assert "tensorstore_spec" not in sentence
    assert "\n" not in sentence
    assert len(sentence) < 500
    assert status == ExitCode.STOPPED
    assert exit_message(raised(RunStopped(limit))) == (f"Stopped: {limit}", ExitCode.STOPPED)


@pytest.mark.parametrize(("error", "reason"), [
    (InputError("x"), Reason.OTHER), (RunStopped("x"), Reason.OTHER), (PeersMissing("x"), Reason.PEERS_MISSING),
    (RunStopped("x", Reason.SPIKE), Reason.SPIKE), (copy.copy(RunStopped("x", Reason.DISK)), Reason.DISK),
    (OSError(errno.ENOSPC, "x"), Reason.DISK), (OSError(errno.EIO, "x"), Reason.DISK), (OSError("x"), Reason.OTHER),
    (MemoryError(), Reason.HOST_MEMORY), (OSError(errno.ENOMEM, "x"), Reason.HOST_MEMORY),
    *[(OSError(code, "x"), Reason.DISK)  # of a file server that is away: NFS, FUSE, Lustre
      for code in (errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.ESHUTDOWN, errno.EHOSTDOWN, errno.EREMOTEIO)],
    (RuntimeError("Out of memory: No space left on device"), Reason.OTHER),  # of its type, not of its text
])  # fmt: skip
def test_the_reason_of_an_error_is_that_of_its_type(error, reason):
    assert exit_reason(error) is reason


def test_a_pipe_that_is_full_and_does_not_block_gets_everything_once_it_is_read():
    code = "from zaya_jax.run.command_output import prepare_streams; prepare_streams(); print('x' * 200_000)"
    read, write = os.pipe()
    os.set_blocking(write, False)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=write)
    os.close(write)
    with os.fdopen(read, "rb") as output:
        assert len(output.read()) == 200_001
    assert process.wait() == 0
