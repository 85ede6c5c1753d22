import functools
import os
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.train_helpers import ROOT, differing
from zaya_jax.checkpoint.reader import verify_checkpoint
from zaya_jax.checkpoint.restore import restore_newest
from zaya_jax.checkpoint.store import CheckpointStore
from zaya_jax.config import CheckpointConfig
from zaya_jax.errors import RunStopped
from zaya_jax.run.checkpoints import saved_steps

ABOUT = {"data": {"sequences": 3}, "heldout_loss": None}


def make_state(seed=0, width=3):
    """What a state holds: arrays of several dtypes, one without an element, an optimizer's state, and a typed key."""
    key = jax.random.key(seed)
    params = {"blocks.0.query": jax.random.normal(key, (2, width)), "norm": jnp.ones(width, jnp.bfloat16)}
    optimizer = optax.partition({"a": optax.adam(0.1), "b": optax.sgd(0.1)}, {"blocks.0.query": "a", "norm": "b"})
    updates, opt_state = optimizer.update(params, optimizer.init(params), params)
    return {"params": updates, "opt_state": opt_state, "step": jnp.int32(seed), "rng": jax.random.fold_in(key, 1),
            "recent": jnp.zeros((0,))}  # fmt: skip


def abstract(state):
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), state)


def open_store(folder, said=None, **config):
    return CheckpointStore(folder, CheckpointConfig(**config), say=print if said is None else said.append)


def save_all(folder, steps, width=3, **config):
    with open_store(folder, **config) as store:
        for step in steps:
            store.save(step, make_state(step, width), ABOUT)


@functools.cache
def abstract_state(width):
    return abstract(make_state(0, width))


def newest(folder, said=None, width=3, **config):
    """What `restore_newest` gives, and its step."""
    said = [] if said is None else said
    with open_store(folder, said, **config) as store:
        found = restore_newest(store, lambda manifest: abstract_state(width), said.append)
    return None if found is None else (found.manifest.step, found.state)


def check(folder, step):
    """The newest checkpoint is that of `step`, and is what `save_all` saved."""
    found = newest(folder)
    assert found is not None
    assert found[0] == step
    assert not differing(found[1], make_state(step))


def test_a_new_folder_has_no_checkpoint(tmp_path):
    with open_store(tmp_path / "new") as store:
        assert store.latest() is None
    assert newest(tmp_path / "new") is None


@pytest.mark.parametrize("verify", ["none", "hash", "readback"])
def test_what_was_saved_comes_back_bitwise(tmp_path, verify):
    save_all(tmp_path, [1, 7], verify=verify)
    assert saved_steps(tmp_path) == [1, 7]
    check(tmp_path, 7)
    assert verify_checkpoint(tmp_path / "7") == []


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_few_are_kept(tmp_path, keep):
    save_all(tmp_path, [2, 4, 6, 7], keep=keep)
    assert saved_steps(tmp_path) == [2, 4, 6, 7][-keep:]


def test_the_one_that_was_read_stays_until_a_newer_one_was(tmp_path):
    save_all(tmp_path, [1, 2], keep=1)
    with open_store(tmp_path, keep=1) as store:
        restore_newest(store, lambda manifest: abstract(make_state()), print)
        for step in (3, 4):
            store.save(step, make_state(step), ABOUT)
    assert saved_steps(tmp_path) == [2, 4]
    with open_store(tmp_path, keep=1, verify="readback") as store:
        store.mark_verified(2)
        store.save(5, make_state(5), ABOUT)
    assert saved_steps(tmp_path) == [5]


def test_what_need_not_be_kept_goes_when_a_run_goes_on(tmp_path):
    """As processes leave it that are killed after a save, each before it removes the one before."""
    save_all(tmp_path, [1, 2, 3], keep=3)
    with open_store(tmp_path, keep=1) as store:
        assert saved_steps(tmp_path) == [1, 2, 3]
        store.take_over(3)
        assert saved_steps(tmp_path) == [3]


def test_a_pinned_one_stays(tmp_path):
    save_all(tmp_path, [1])
    (tmp_path / "1" / "PINNED").touch()
    save_all(tmp_path, [2, 3], keep=1)
    assert saved_steps(tmp_path) == [1, 3]


def test_a_step_that_is_saved_already_stays(tmp_path):
    save_all(tmp_path, [1])
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "1").rglob("*")}
    save_all(tmp_path, [1])
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "1").rglob("*")} == before


def test_arrays_can_be_donated_as_soon_as_a_save_has_begun(tmp_path):
    @jax.jit
    def make(n):
        return {"x": jnp.full((1 << 21,), n, jnp.float32)}

    overwrite = jax.jit(lambda state: jax.tree.map(lambda x: x * 0 - 1, state), donate_argnums=0)
    with open_store(tmp_path, keep=3) as store:
        for step in (1, 2, 3):
            state = make(step)
            kept = abstract(state)
            store.save(step, state, ABOUT)
            state = overwrite(state)
            assert float(state["x"][0]) == -1
    for step in (3, 2, 1):
        with open_store(tmp_path) as store:
            found = restore_newest(store, lambda manifest: kept, print)
        assert found is not None
        assert np.array_equal(found.state["x"], np.full(1 << 21, found.manifest.step, np.float32))
        (tmp_path / str(step)).rename(tmp_path / f"gone{step}")


def test_a_block_ends_when_the_last_save_is_whole(tmp_path):
    with open_store(tmp_path) as store:
        store.save(1, {"x": jnp.ones((1 << 22,))}, ABOUT)
    assert saved_steps(tmp_path) == [1]


KILLED = """
import os, signal, sys, threading, time, pathlib
import jax.numpy as jnp
from tests.checkpoint.test_store import ABOUT, make_state, open_store
folder = pathlib.Path(sys.argv[1])
with open_store(folder) as store:
    store.save(1, make_state(1), ABOUT)
    store.settle()
    large = {"x": jnp.ones((1 << 27,))}
    def kill():
        while not any("tmp" in path.name for path in folder.glob("2*")):
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Thread(target=kill, daemon=True).start()
    store.save(2, large, ABOUT)
"""


def test_a_save_that_was_killed_is_neither_listed_nor_left(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)], cwd=ROOT, capture_output=True, timeout=120, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    left = [path.name for path in tmp_path.iterdir() if path.name not in ("1", "GENERATION")]
    assert left  # so that there is something to clean up
    assert all("tmp" in name for name in left)
    check(tmp_path, 1)
    save_all(tmp_path, [2])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2", "GENERATION"]
    check(tmp_path, 2)


def test_a_save_that_fails_is_told_and_tried_again(tmp_path, monkeypatch):
    said = []
    with open_store(tmp_path / "run", said) as store:
        store.save(1, make_state(1), ABOUT)
        store.settle()
        os.rename(tmp_path / "run", tmp_path / "away")
        (tmp_path / "run").write_text("in the way")
        store.save(2, make_state(2), ABOUT)
        assert not store.settle()
        assert "The checkpoint of step 2 could not be saved" in said[0]
        assert "Training continues" in said[0]
        assert not store.due()  # not yet
        (tmp_path / "run").unlink()
        os.rename(tmp_path / "away", tmp_path / "run")
        monkeypatch.setattr(time, "monotonic", lambda now=time.monotonic: now() + 11)
        assert store.due()
        store.save(3, make_state(3), ABOUT)
        assert store.settle()
        assert not store.due()
    assert said[1:] == ["The checkpoint of step 3 is saved."]
    check(tmp_path / "run", 3)


def test_a_run_stops_where_nothing_can_be_saved_for_too_long(tmp_path):
    (tmp_path / "run").write_text("in the way")
    said = []
    with open_store(tmp_path / "run", said, loss_window=0.5) as store:
        store.save(1, make_state(1), ABOUT)
        time.sleep(0.6)
        with pytest.raises(RunStopped, match=r"more than checkpoint.loss_window \(0.5 s\); nothing is saved yet"):
            store.save(2, make_state(2), ABOUT)


def test_how_long_nothing_can_be_saved_counts_from_the_first_failure(tmp_path):
    said = []
    with open_store(tmp_path / "run", said, loss_window=0.3) as store:
        store.save(1, make_state(1), ABOUT)
        assert store.settle()
        time.sleep(0.4)  # as between two saves of a run that saves rarely
        os.rename(tmp_path / "run", tmp_path / "away")
        (tmp_path / "run").write_text("in the way")
        store.save(2, make_state(2), ABOUT)
    assert "Training continues" in said[0]


def test_a_state_that_cannot_be_read_is_told_and_leaves_nothing(tmp_path):
    said = []
    with open_store(tmp_path, said) as store:
        gone = make_state(1)
        gone["step"].delete()
        store.save(1, gone, ABOUT)
        assert not store.settle()
        assert [path.name for path in tmp_path.iterdir()] == ["GENERATION"]
        store.save(2, make_state(2), ABOUT)
    assert "Array has been deleted" in said[0]
    check(tmp_path, 2)


def test_who_was_given_up_for_dead_saves_nothing(tmp_path):
    said = []
    with open_store(tmp_path, said) as stale:
        stale.save(1, make_state(1), ABOUT)
        stale.settle()
        with open_store(tmp_path) as newer:
            newer.save(2, make_state(2), ABOUT)
        stale.save(3, make_state(3), ABOUT)
        assert not stale.settle()
    assert "its fencing token is 2, here it is 1" in said[0]
    check(tmp_path, 2)
