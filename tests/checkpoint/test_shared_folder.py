"""A run in a folder that others can write too: planted names harm nothing, and a team goes on with the run."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.checkpoint.test_store import ABOUT, make_state, open_store
from tests.train_helpers import ROOT, small_run
from tests.users_helpers import OTHER, PLANTED, TEAM, VICTIM, content, make_home, needs_root, plant, public_folder, user
from zaya_jax.aegis.attempt import write_evidence
from zaya_jax.aegis.events import EventLog
from zaya_jax.aegis.exit_codes import SupervisorExit
from zaya_jax.aegis.file_worker import FileWorker
from zaya_jax.aegis.state import write_state, write_verdict
from zaya_jax.config import to_yaml
from zaya_jax.errors import InputError, as_sentence
from zaya_jax.evaluate.evaluate_command import append_row
from zaya_jax.hf.exporter import output_folder
from zaya_jax.run.checkpoints import CHECKPOINTS, saved_steps
from zaya_jax.run.digests import digest
from zaya_jax.run.files import write_atomically
from zaya_jax.run.folder import lock_folder
from zaya_jax.run.metrics import DiskGuard, JsonlFile, read_rows
from zaya_jax.run.writing import make_folder

# Names in the run folder, and beside it, that others can foretell. LOCAL is the local copy.
NAMES = [".lock", "metrics.jsonl", "metrics.jsonl.partial", "timings.jsonl", "config.yaml", "checkpoints",
         "checkpoints/1", "checkpoints/2", "checkpoints/1.g1", "checkpoints/2.g1", "checkpoints/1.deleted",
         "checkpoints/1.g1.orbax-checkpoint-tmp", "checkpoints/GENERATION", "aegis", "aegis/node", "aegis/node/.lock",
         "aegis/node/events.jsonl", "aegis/node/state.json", "aegis/node/state.json.partial", "aegis/node/verdict.json",
         "aegis/node/evidence", "aegis/node/evidence/attempt-1", "aegis/node/evidence/attempt-1/process-0.stdout",
         "evaluations", "evaluations/scores.jsonl", "hf", "hf.partial",
         "LOCAL"]  # fmt: skip


def train(run: Path, first: int) -> list[str]:
    """Write what a supervised run writes, two steps of it; return what was said."""
    messages: list[str] = []

    @contextlib.contextmanager
    def part():
        try:
            yield
        except (OSError, InputError) as error:
            messages.append(as_sentence(error))

    with part(), lock_folder(run):
        with part():
            write_atomically(run / "config.yaml", "run\n")
        for name in ("metrics.jsonl", "timings.jsonl"):
            with part():
                rows = JsonlFile(run / name, first, 0, DiskGuard(messages.append))
                for step in (first + 1, first + 2):
                    rows.append({"step": step})
                rows.close()
        with part(), open_store(run / CHECKPOINTS, messages, keep=1, local_dir=str(run / "shm")) as store:
            store.take_over(first)
            for step in (first + 1, first + 2):
                store.save(step, make_state(step), ABOUT)
    node = run / "aegis" / "node"
    with part():
        make_folder(node)
        with lock_folder(node):
            events = EventLog(node, "node", FileWorker())
            events.write("start", "start")
            assert events.close()
    write_state(node, attempt=1)
    write_verdict(node, SupervisorExit.DONE, "done", 1, first + 2)
    with part():
        write_evidence(node, "attempt-1", {"process-0.stdout": b"text"})
    with part():
        append_row(run / "evaluations" / "scores.jsonl", {"step": first})
    with part(), output_folder(run / "hf", {"config.json": "{}"}):
        pass
    return messages


@contextlib.contextmanager
def shared_run(mode: int):
    """A run folder of a team beside the home of one member."""
    with public_folder() as base:
        make_home(base / "home")
        run = base / "run"
        run.mkdir()
        os.chown(run, VICTIM, TEAM)
        run.chmod(mode)
        yield base / "home", run


@needs_root
@given(st.dictionaries(st.sampled_from(NAMES), st.sampled_from(sorted(PLANTED)), max_size=3),
       st.sampled_from([0o777, 0o1777, 0o2775]))  # fmt: skip
def test_a_run_harms_nothing_of_its_user_whatever_others_planted(planted, mode):
    with shared_run(mode) as (home, run):
        local = run / "shm" / f"{digest(os.fsencode(run / CHECKPOINTS))[:12]}"
        for name, kind in planted.items():
            with contextlib.suppress(OSError):  # below a name that is planted itself
                plant(kind, local if name == "LOCAL" else run / name, home)
        before = content(home)
        with user(VICTIM):
            messages = train(run, 0)
        assert content(home) == before
        if not planted:
            assert messages == []
            assert saved_steps(run / CHECKPOINTS) == [2]
            assert [path.name for path in local.iterdir()] == ["2"]


@needs_root
def test_another_member_of_the_team_goes_on_with_a_run():
    with shared_run(0o2775) as (_, run):
        with user(VICTIM):
            assert train(run, 0) == []
        with user(OTHER):
            messages = train(run, 2)
        assert saved_steps(run / CHECKPOINTS) == [4]  # the second member removed the first one's
        assert [row["step"] for row in read_rows(run / "metrics.jsonl")] == [1, 2, 3, 4]
        assert {path.lstat().st_uid for path in run.iterdir()} == {VICTIM, OTHER}
        assert [text for text in messages if "local_dir" not in text and "hf exists" not in text] == []


@needs_root
def test_what_a_save_of_another_member_left_is_named_once_as_only_its_owner_can_remove_it():
    with shared_run(0o2775) as (_, run):
        with user(VICTIM):
            assert train(run, 0) == []
            for name in ("7.g1", "8.g1"):
                (run / CHECKPOINTS / name).mkdir(0o700)
                (run / CHECKPOINTS / name / "array").touch()
        with user(OTHER):
            messages = [text for text in train(run, 2) if "8.g1" in text]
        assert len(messages) == 1
        assert f"rm -r {run / CHECKPOINTS / '7.g1'} {run / CHECKPOINTS / '8.g1'}" in messages[0]
        assert (run / CHECKPOINTS / "8.g1").exists()


@needs_root
@pytest.mark.parametrize("kind", ["link to a folder", "folder"])
def test_a_local_copy_that_cannot_be_private_is_reported_with_its_key_and_not_written(kind):
    with shared_run(0o1777) as (home, run):
        local = run / "shm" / f"{digest(os.fsencode(run / CHECKPOINTS))[:12]}"
        plant(kind, local, home)
        before = content(home)
        with user(VICTIM):
            messages = train(run, 0)
        assert len(messages) == 1
        for text in (
            "checkpoint.local_dir",
            str(local),
            f"belongs to user {OTHER}",
            "Remove it, or choose another folder",
        ):
            assert text in messages[0]
        assert content(home) == before
        assert saved_steps(run / CHECKPOINTS) == [2]


def supervised(uid: int, base: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """Train under the supervisor as a user, whose umask leaves files to the group."""
    home = base / f"home-{uid}"
    home.mkdir()
    os.chown(home, uid, uid)
    environment = {key: value for key, value in os.environ.items() if key != "JAX_COMPILATION_CACHE_DIR"}
    # It may read everything, since Python may be in root's home, but write only what the user may.
    reads = [f"--{kind}-caps=+dac_read_search" for kind in ("inh", "ambient")]
    return subprocess.run(
        ["setpriv", f"--reuid={uid}", f"--regid={uid}", f"--groups={TEAM}", *reads, "--",
         sys.executable, "-m", "zaya_jax.aegis", "run", "--", "/usr/bin/env", sys.executable, "-m", "zaya_jax.main",
         "--config", str(base / "run.yaml"), f"run_dir={base / 'team' / 'run'}",
         f"data.cache_dir={base / 'team' / 'cache'}", *overrides],
        umask=0o002, env={**environment, "HOME": str(home)}, cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip


@needs_root
@pytest.mark.soak
def test_the_supervised_training_of_one_member_is_lengthened_by_another():
    with public_folder() as base:
        config = small_run(base)
        for path in (base, *base.rglob("*")):
            path.chmod(0o755)
        (base / "run.yaml").write_text(to_yaml(config))
        (base / "team").mkdir()
        os.chown(base / "team", VICTIM, TEAM)
        (base / "team").chmod(0o2775)
        for uid, steps in ((VICTIM, 4), (OTHER, 8)):
            done = supervised(uid, base, f"phases.0.tokens={steps * 128}", "checkpoint.every=2")
            assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        run = base / "team" / "run"
        assert [row["step"] for row in read_rows(run / "metrics.jsonl")] == list(range(1, 9))
        assert saved_steps(run / CHECKPOINTS)[-1] == 8
        assert {path.lstat().st_uid for path in (run / CHECKPOINTS).iterdir()} == {VICTIM, OTHER}
