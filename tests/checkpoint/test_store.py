import gc
import os
import shutil
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.train_helpers import ROOT, Position, differing, small_run, snapshot
from zaya_jax.checkpoint.store import CheckpointStore, environment, read_part
from zaya_jax.config import CheckpointConfig, to_dict
from zaya_jax.data.pipeline import train_batches
from zaya_jax.data.sources import open_sources
from zaya_jax.errors import InputError

ABOUT = {"model": {"hidden_size": 16, "layer_pattern": ["full"], "sliding_window": None}, "seed": 0}


def make_state(seed=0, width=3):
    """What a state holds: arrays of several dtypes, an optimizer's state, and a typed key."""
    key = jax.random.key(seed)
    params = {"blocks.0.query": jax.random.normal(key, (2, width)), "norm": jnp.ones(width, jnp.bfloat16)}
    optimizer = optax.partition({"a": optax.adam(0.1), "b": optax.sgd(0.1)}, {"blocks.0.query": "a", "norm": "b"})
    updates, opt_state = optimizer.update(params, optimizer.init(params), params)
    return {"params": updates, "opt_state": opt_state, "step": jnp.int32(seed), "rng": jax.random.fold_in(key, 1)}


def abstract(state):
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), state)


def open_store(folder, **config):
    return CheckpointStore(folder, CheckpointConfig(**config))


def save_all(folder, steps, **config):
    with open_store(folder, **config) as store:
        for step in steps:
            store.save(step, make_state(step), Position(f"at {step}"), ABOUT)


def steps_in(folder):
    return sorted(int(path.name) for path in folder.iterdir())


def check(folder, step):
    """The checkpoint of `step` is what `save_all` saved."""
    position = Position()
    with open_store(folder) as store:
        assert not differing(store.restore(step, abstract(make_state()), position), make_state(step))
        assert store.about(step) == {"config": ABOUT, "environment": environment()}
    assert position.text == f"at {step}"


def test_a_new_folder_has_no_checkpoint(tmp_path):
    with open_store(tmp_path / "new") as store:
        assert store.latest() is None


def test_what_was_saved_comes_back_bitwise(tmp_path):
    save_all(tmp_path, [1, 7])
    check(tmp_path, 1)
    check(tmp_path, 7)
    with open_store(tmp_path) as store:
        assert store.latest() == 7
        assert store.restore(7, abstract(make_state()), Position())["rng"].dtype == make_state()["rng"].dtype


def test_the_data_goes_on_where_it_was_saved(tmp_path):
    config = small_run(tmp_path)
    prepared = open_sources(config)
    with train_batches(config, prepared) as batches, open_store(tmp_path / "store") as store:
        for _ in range(3):
            next(batches)
        store.save(3, make_state(3), batches, to_dict(config))
        following = [next(batches)["tokens"] for _ in range(2)]  # the save may still be under way
    with train_batches(config, prepared) as batches, open_store(tmp_path / "store") as store:
        store.restore(3, abstract(make_state()), batches)
        assert all(np.array_equal(next(batches)["tokens"], tokens) for tokens in following)
        assert store.about(3)["config"] == to_dict(config)


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_few_are_kept(tmp_path, keep):
    save_all(tmp_path, [2, 4, 6, 7], keep=keep)
    assert steps_in(tmp_path) == [2, 4, 6, 7][-keep:]


def test_steps_off_the_interval_are_saved_too(tmp_path):
    save_all(tmp_path, [1, 3], every=100)
    assert steps_in(tmp_path) == [1, 3]


def test_arrays_can_be_donated_as_soon_as_a_save_has_begun(tmp_path):
    @jax.jit
    def make(n):
        return {"x": jnp.full((1 << 21,), n, jnp.float32)}

    overwrite = jax.jit(lambda state: jax.tree.map(lambda x: x * 0 - 1, state), donate_argnums=0)
    with open_store(tmp_path) as store:
        for step in (1, 2):
            state = make(step)
            kept = abstract(state)
            store.save(step, state, Position(), ABOUT)
            state = overwrite(state)
            assert float(state["x"][0]) == -1
    with open_store(tmp_path) as store:
        for step in (1, 2):
            assert np.array_equal(store.restore(step, kept, Position())["x"], np.full(1 << 21, step, np.float32))


def test_a_block_ends_when_the_last_save_is_whole(tmp_path):
    with open_store(tmp_path) as store:
        store.save(1, {"x": jnp.ones((1 << 22,))}, Position(), ABOUT)
    assert steps_in(tmp_path) == [1]
    with open_store(tmp_path) as store:
        assert store.latest() == 1


KILLED = """
import os, signal, sys, threading, time, pathlib
import jax.numpy as jnp
from tests.checkpoint.test_store import ABOUT, Position, make_state, open_store
folder = pathlib.Path(sys.argv[1])
with open_store(folder) as store:
    store.save(1, make_state(1), Position("at 1"), ABOUT)
    store.latest()
    large = {"x": jnp.ones((1 << 27,))}
    def kill():
        while not any("tmp" in path.name for path in folder.glob("2*")):
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Thread(target=kill, daemon=True).start()
    store.save(2, large, Position("at 2"), ABOUT)
"""


def test_a_save_that_was_killed_is_neither_listed_nor_left(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)], cwd=ROOT, capture_output=True, timeout=120, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    left = [path.name for path in tmp_path.iterdir() if path.name != "1"]
    assert left  # so that there is something to clean up
    assert all("tmp" in name for name in left)
    with open_store(tmp_path) as store:
        assert store.latest() == 1
        store.save(2, make_state(2), Position("at 2"), ABOUT)
    assert steps_in(tmp_path) == [1, 2]
    check(tmp_path, 1)
    check(tmp_path, 2)


def test_an_older_checkpoint_that_is_half_deleted_hinders_nothing(tmp_path):
    save_all(tmp_path, [1, 2])
    for name in ("state", "about"):
        shutil.rmtree(tmp_path / "1" / name)
    check(tmp_path, 2)
    save_all(tmp_path, [3])
    assert steps_in(tmp_path) == [2, 3]


# --- what is refused -------------------------------------------------------------------------------------------

# Orbax leaves the reads that it has not begun to the garbage collector, which complains whenever it finds them.
UNREAD = pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")


@pytest.fixture
def collected():
    yield
    gc.collect()


def others():
    state = make_state()
    more = {**state, "params": {**state["params"], "head_bias": jnp.zeros(2)}}
    fewer = {**state, "params": {"norm": state["params"]["norm"]}}
    return {"shape": make_state(width=4), "more": more, "fewer": fewer}


@UNREAD
@pytest.mark.usefixtures("collected")
@pytest.mark.parametrize("other", ["shape", "more", "fewer"])
def test_another_architecture_is_refused_naming_the_step(tmp_path, other, caplog):
    save_all(tmp_path, [7])
    before = snapshot(tmp_path)
    with open_store(tmp_path) as store, pytest.raises(InputError, match="The checkpoint of step 7 in"):
        store.restore(7, abstract(others()[other]), Position())
    assert snapshot(tmp_path) == before
    assert not caplog.records  # the sentence says it; no library adds to it


def test_a_part_of_a_state_is_read_in_the_dtype_asked_for(tmp_path):
    save_all(tmp_path / "checkpoints", [7])
    wanted = {"params": abstract(make_state())["params"]}
    wanted["params"]["blocks.0.query"] = jax.ShapeDtypeStruct(
        (2, 3), jnp.bfloat16, sharding=wanted["params"]["norm"].sharding
    )
    found = read_part(str(tmp_path), wanted)
    expected = make_state(7)["params"]
    expected["blocks.0.query"] = expected["blocks.0.query"].astype(jnp.bfloat16)
    assert not differing(found, {"params": expected})
    with pytest.raises(InputError, match=r"holds no \['params'\]\['more'\] of the shape \(3,\)"):
        read_part(str(tmp_path), {"params": {**wanted["params"], "more": wanted["params"]["norm"]}})


def damaged(folder, part):
    """Cut every larger file of one part of the checkpoint in half."""
    files = [path for path in (folder / "7" / part).rglob("*") if path.is_file() and path.stat().st_size]
    assert files
    for path in files:
        os.truncate(path, path.stat().st_size // 2)


@UNREAD
@pytest.mark.usefixtures("collected")
def test_a_damaged_state_is_refused_naming_the_step(tmp_path):
    save_all(tmp_path, [7])
    damaged(tmp_path, "state")
    with open_store(tmp_path) as store, pytest.raises(InputError, match="The checkpoint of step 7 in"):
        store.restore(7, abstract(make_state()), Position())


@UNREAD
@pytest.mark.usefixtures("collected")
def test_a_damaged_description_is_refused_naming_the_step(tmp_path):
    save_all(tmp_path, [7])
    damaged(tmp_path, "about")
    with open_store(tmp_path) as store, pytest.raises(InputError, match="The checkpoint of step 7 in"):
        store.about(7)


def test_the_environment_is_what_bits_depend_on():
    found = environment()
    assert found["jax"] == jax.__version__
    assert found["devices"] == jax.device_count()
    assert found["cpus"] == len(os.sched_getaffinity(0))
    assert all(isinstance(value, str | int) for value in found.values())
