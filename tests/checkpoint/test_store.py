import functools
import os
import shutil
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.train_helpers import differing
from zaya_jax.checkpoint.reader import verify_checkpoint
from zaya_jax.checkpoint.restore import restore_newest
from zaya_jax.checkpoint.store import CheckpointStore
from zaya_jax.config import CheckpointConfig
from zaya_jax.errors import Reason, RunStopped
from zaya_jax.run.checkpoints import saved_steps
from zaya_jax.run.fencing import read_token

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


def open_store(folder, messages=None, **config):
    store = CheckpointStore(folder, CheckpointConfig(**config))
    store.say = print if messages is None else messages.append
    return store


def save_all(folder, steps, width=3, **config):
    with open_store(folder, **config) as store:
        for step in steps:
            store.save(step, make_state(step, width), ABOUT)


@functools.cache
def abstract_state(width):
    return abstract(make_state(0, width))


def restored(store, state, messages=None):
    """Step and state of the newest checkpoint, laid out as `state`."""
    say = [].append if messages is None else messages.append
    checkpoint = restore_newest(store, lambda manifest: abstract(state), say)
    assert checkpoint is not None
    return checkpoint.manifest.step, checkpoint.state


def newest(folder, messages=None, width=3, **config):
    """Step and state of the newest checkpoint in `folder`."""
    with open_store(folder, messages, **config) as store:
        return restored(store, abstract_state(width), messages)


def check(folder, step):
    """The newest checkpoint is that of `step`, and is what `save_all` saved."""
    newest_step, state = newest(folder)
    assert newest_step == step
    assert not differing(state, make_state(step))


@pytest.mark.parametrize("verify", ["none", "hash", "readback"])
def test_what_was_saved_comes_back_bitwise(tmp_path, verify):
    save_all(tmp_path, [1, 7], verify=verify)
    assert saved_steps(tmp_path) == [1, 7]
    check(tmp_path, 7)
    assert verify_checkpoint(tmp_path / "7") == []


def test_the_one_that_was_read_stays_until_a_newer_one_was(tmp_path):
    save_all(tmp_path, [1, 2], keep=1)
    with open_store(tmp_path, keep=1) as store:
        restored(store, make_state())
        for step in (3, 4):
            store.save(step, make_state(step), ABOUT)
    assert saved_steps(tmp_path) == [2, 4]
    with open_store(tmp_path, keep=1, verify="readback") as store:
        store.verified.add(2)
        store.save(5, make_state(5), ABOUT)
    assert saved_steps(tmp_path) == [5]


def test_what_need_not_be_kept_goes_when_a_run_goes_on(tmp_path):
    """As processes leave it that are killed after a save, each before it removes the one before."""
    save_all(tmp_path, [1, 2, 3], keep=3)
    with open_store(tmp_path, keep=1) as store:
        assert saved_steps(tmp_path) == [1, 2, 3]
        store.take_over(3)
        assert saved_steps(tmp_path) == [3]


def test_a_process_takes_one_token_though_the_one_before_still_removes_checkpoints(tmp_path, monkeypatch):
    save_all(tmp_path, [1, 2], keep=2)
    with open_store(tmp_path) as store:
        restored(store, make_state())
        shutil.rmtree(tmp_path / "2")
        monkeypatch.setattr(store, "steps", lambda: [1, 2])  # as listed just before
        number = read_token(tmp_path).number
        store.take_over(1)
        store.save(3, make_state(3), ABOUT)
    assert read_token(tmp_path).number == number + 1
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
            newest_step, state = restored(store, kept)
        assert newest_step == step
        assert np.array_equal(state["x"], np.full(1 << 21, step, np.float32))
        (tmp_path / str(step)).rename(tmp_path / f"gone{step}")


def test_a_save_that_fails_is_told_and_tried_again(tmp_path, monkeypatch):
    messages = []
    with open_store(tmp_path / "run", messages) as store:
        store.save(1, make_state(1), ABOUT)
        store.wait()
        os.rename(tmp_path / "run", tmp_path / "away")
        (tmp_path / "run").write_text("in the way")
        store.save(2, make_state(2), ABOUT)
        assert not store.wait()
        assert "The checkpoint of step 2 could not be saved" in messages[0]
        assert "Training continues" in messages[0]
        assert not store.due()  # not yet
        (tmp_path / "run").unlink()
        os.rename(tmp_path / "away", tmp_path / "run")
        monkeypatch.setattr(time, "monotonic", lambda now=time.monotonic: now() + 11)
        assert store.due()
        store.save(3, make_state(3), ABOUT)
        assert store.wait()
        assert not store.due()
    assert messages[1:] == ["The checkpoint of step 3 is saved."]
    check(tmp_path / "run", 3)


@pytest.fixture
def later(monkeypatch):
    """Turns the clock forward by some seconds."""
    return lambda seconds: monkeypatch.setattr(time, "monotonic", lambda now=time.monotonic: now() + seconds)


def test_a_run_stops_where_nothing_can_be_saved_for_too_long(tmp_path, later):
    (tmp_path / "run").write_text("in the way")
    messages = []
    with open_store(tmp_path / "run", messages, max_unsaved_seconds=500.0) as store:
        store.save(1, make_state(1), ABOUT)
        later(501)
        with pytest.raises(
            RunStopped, match=r"more than checkpoint.max_unsaved_seconds \(500 s\); there is no checkpoint yet"
        ) as end:
            store.save(2, make_state(2), ABOUT)
    assert end.value.reason is Reason.SAVE_FAILED


def test_how_long_nothing_can_be_saved_counts_from_the_first_failure(tmp_path, later):
    messages = []
    with open_store(tmp_path / "run", messages, max_unsaved_seconds=300.0) as store:
        store.save(1, make_state(1), ABOUT)
        assert store.wait()
        later(400)  # as between two saves of a run that saves rarely
        os.rename(tmp_path / "run", tmp_path / "away")
        (tmp_path / "run").write_text("in the way")
        store.save(2, make_state(2), ABOUT)
    assert "Training continues" in messages[0]


def test_a_state_that_cannot_be_read_is_told_and_leaves_nothing(tmp_path):
    messages = []
    with open_store(tmp_path, messages) as store:
        gone = make_state(1)
        gone["step"].delete()
        store.save(1, gone, ABOUT)
        assert not store.wait()
        assert [path.name for path in tmp_path.iterdir()] == ["GENERATION"]
        store.save(2, make_state(2), ABOUT)
    assert "Array has been deleted" in messages[0]
    check(tmp_path, 2)
