"""A state saved by jobs of one shape and restored by jobs of another: `python -m tests.checkpoint.reshape_helpers`."""

import dataclasses
import json
import os
import subprocess
import sys
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from tests.checkpoint.test_store import ABOUT
from tests.job.processes_helpers import CHEAP, free_port, wide_everywhere
from tests.parallel_helpers import WIDE
from tests.train_helpers import ROOT, make_program, placed_step
from zaya_jax.checkpoint.arrays import like, named
from zaya_jax.checkpoint.reader import CheckpointReader
from zaya_jax.checkpoint.restore import restore_newest
from zaya_jax.checkpoint.store import CheckpointStore
from zaya_jax.config import BatchConfig, CheckpointConfig, ParallelConfig
from zaya_jax.job.multihost import join


class Shape(NamedTuple):
    """Of a job."""

    processes: int
    devices: int  # in all processes together
    parallel: ParallelConfig


SHAPES = {
    "1 process": Shape(1, 1, ParallelConfig()),
    "2 processes": Shape(2, 4, ParallelConfig(data=2, fsdp=2)),
    "4 processes": Shape(4, 4, ParallelConfig(fsdp=4)),
    "data 8": Shape(1, 8, ParallelConfig()),
    "fsdp 8": Shape(1, 8, ParallelConfig(fsdp=8)),
    "expert 4 x 2": Shape(1, 8, ParallelConfig(expert=4)),
    "context 2 x 4": Shape(1, 8, ParallelConfig(context=4)),
    "data 3 x fsdp 2": Shape(1, 6, ParallelConfig(data=3, fsdp=2)),
    "fsdp 3 x data 2": Shape(1, 6, ParallelConfig(data=2, fsdp=3)),
}
TRAINED = ("params.", "opt_state.", "balance.", "balance_state.")


class Job:
    """The state and the steps of one shape, in one of its processes."""

    def __init__(self, shape: Shape) -> None:
        batch = BatchConfig(tokens=48 * WIDE.data.context, micro_batch=24)  # which six and eight devices divide
        train = dataclasses.replace(WIDE.train, batch=batch)
        self.config = dataclasses.replace(WIDE, parallel=shape.parallel, train=train)
        self.program = make_program(self.config, shape.devices)
        self.mesh, self.abstract = self.program.placement.mesh, self.program.abstract_state

    def state(self) -> Any:
        """The same values in every shape: noise in all that training changes, and zeros."""
        arrays = {}
        for name, leaf in named(self.abstract).items():
            value = np.zeros(leaf.shape, leaf.dtype)
            if name.startswith(TRAINED) and np.issubdtype(value.dtype, np.floating):
                noise = np.random.default_rng(zlib.crc32(name.encode())).random(value.shape)
                value = (0.01 * noise).astype(value.dtype)
            arrays[name] = jax.make_array_from_callback(value.shape, leaf.sharding, value.__getitem__)
        return like(self.abstract, arrays)

    def save(self, folder: Path) -> None:
        with CheckpointStore(folder, CheckpointConfig()) as store:
            store.save(1, self.state(), ABOUT)

    def restore(self, folder: Path) -> Any:
        """The state, bitwise what a reader without devices finds in the files."""
        store = CheckpointStore(folder, CheckpointConfig())
        restored = restore_newest(store, lambda manifest: self.abstract, print)
        assert restored is not None
        reader, arrays = CheckpointReader(folder / "1", restored.manifest.leaves), named(restored.state)
        assert arrays.keys() == restored.manifest.leaves.keys()
        for name, array in arrays.items():
            value = reader.read(name)
            assert array.dtype == value.dtype, name
            for shard in array.addressable_shards:
                assert np.asarray(shard.data).tobytes() == value[shard.index].tobytes(), (name, shard.index)
        for wanted, leaf in zip(jax.tree.leaves(self.abstract), jax.tree.leaves(restored.state), strict=True):
            assert leaf.sharding.is_equivalent_to(wanted.sharding, leaf.ndim)
        return restored.state

    def losses(self) -> Callable[[Any], list[float]]:
        """What gives the losses of the two steps after a state."""
        step, batch = placed_step(self.program)

        def after(state: Any) -> list[float]:
            losses = []
            for _ in range(2):
                state, metrics = step(state, batch)
                losses.append(float(metrics["loss"]))
            return losses

        return after


def reshape_here(folder: Path, savers: Sequence[str], restorers: Sequence[str]) -> int:
    """Save by each of some shapes of one process and restore by each of others; gives the number of pairs."""
    with wide_everywhere():
        jobs = {name: Job(SHAPES[name]) for name in (*savers, *restorers)}
        for saver in savers:
            jobs[saver].save(folder / saver)
            for restorer in restorers:
                jobs[restorer].restore(folder / saver)
    return len(savers) * len(restorers)


def run_job(folder: Path, what: str, name: str, seconds: float = 280) -> Any:
    """`save` by the shape `name`, or `restore` what all have saved; what process 0 has found."""
    shape, port = SHAPES[name], free_port()
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": str(shape.devices // shape.processes), "XLA_FLAGS": CHEAP}
    command = [sys.executable, "-m", "tests.checkpoint.reshape_helpers", what, name, str(folder), str(port)]
    processes = [
        subprocess.Popen([*command, str(index)], cwd=ROOT, env=environment, stdout=subprocess.PIPE,
                         stderr=subprocess.PIPE, text=True)
        for index in range(shape.processes)
    ]  # fmt: skip
    try:
        output = [process.communicate(timeout=seconds) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(process.returncode == 0 for process in processes), output
    return json.loads(output[0][0].splitlines()[-1])


def _main(what: str, name: str, folder: str, port: str, index: str) -> None:
    jax.config.update("jax_enable_x64", True)
    shape = SHAPES[name]
    if shape.processes > 1:
        join((f"127.0.0.1:{port}", shape.processes, int(index)), 60, 60.0)
    job = Job(shape)
    if what == "save":
        job.save(Path(folder) / name)
        print(json.dumps("saved"))
        return
    losses = job.losses()
    print(json.dumps({saver: losses(job.restore(Path(folder) / saver)) for saver in SHAPES}))


if __name__ == "__main__":
    _main(*sys.argv[1:])
