"""A process that saves again and again until it is killed, in the middle of something."""

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tests.devices_helpers import ROOT
from zaya_jax.checkpoint.restore import restore_newest
from zaya_jax.checkpoint.store import CheckpointStore
from zaya_jax.config import CheckpointConfig
from zaya_jax.run.checkpoints import saved_steps

# What Python tells audit hooks of the files it touches; between them, tensorstore writes.
FILE_EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir", "shutil.rmtree"}


def make_small(step: int) -> dict[str, jax.Array]:
    return {"x": jnp.arange(20_000, dtype=jnp.float32) * step, "step": jnp.int32(step)}


def take_over(store: CheckpointStore) -> int:
    """Go on with a run; returns the step of its newest checkpoint, which is restored bitwise, or 0."""
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device) for name, x in make_small(0).items()}
    restored = restore_newest(store, lambda manifest: abstract, print)
    step = 0 if restored is None else restored.manifest.step
    if restored is not None:
        assert all(np.array_equal(restored.state[name], array) for name, array in make_small(step).items())
    store.take_over(step)
    return step


def save_until_killed(folder: Path, at: int, removing: bool) -> None:
    """Go on with the run in `folder` and kill this process at its file event `at`, of removals alone if so asked."""
    with CheckpointStore(folder, CheckpointConfig(keep=1)) as store:
        step = take_over(store)
        print(json.dumps({"step": step, "there": sorted(path.name for path in folder.iterdir())}), flush=True)
        seen = 0

        def count(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal seen
            if event in FILE_EVENTS and (not removing or ".deleted" in str(arguments[0])):
                seen += 1
                if seen == at:
                    os.write(1, json.dumps({"event": event, "of": str(arguments[0])}).encode())
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        while True:
            step += 1
            store.save(step, make_small(step), {"heldout_loss": None})


class Killed(NamedTuple):
    """How a process began and ended."""

    step: int  # that it went on from
    there: list[str]  # what lay in the folder then
    newest: int  # the checkpoint it left
    event: str  # at which it was killed
    of: str


def kill_once(folder: Path, at: int, removing: bool) -> Killed:
    """One process, in `folder`."""
    code = (f"from pathlib import Path; from tests.checkpoint.kill_helpers import save_until_killed\n"
            f"save_until_killed(Path({str(folder)!r}), {at}, {removing})")  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    assert done.stderr == b"", done.stderr.decode()
    begun, ended = (json.loads(line) for line in done.stdout.splitlines())
    return Killed(begun["step"], begun["there"], max(saved_steps(folder), default=0), ended["event"], ended["of"])


def check_kills_of_saves(folder: Path, kills: int, seed: int) -> list[Killed]:
    """Kill one process after the other; each goes on with what the one before left, and so does this one at the end."""
    rng, history, newest = random.Random(seed), [], 0
    for index in range(kills):
        removing = index % 3 == 1
        killed = kill_once(folder, rng.randint(1, 40 if removing else 400), removing)
        check_left(killed.step, killed.there, newest)
        assert killed.newest >= newest
        newest = killed.newest
        history.append(killed)
    with CheckpointStore(folder, CheckpointConfig(keep=1)) as store:
        check_left(take_over(store), [path.name for path in folder.iterdir()], newest)
    return history


def check_left(step: int, there: Sequence[str], newest: int) -> None:
    """The newest that was finished is restored, and nothing else left: of a save or a removal, or an older one."""
    assert step == newest
    assert set(there) == {"GENERATION", *([str(newest)] if newest else [])}, there
