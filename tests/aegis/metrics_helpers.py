"""A run folder with everything that the exporter reads, made by the writers that make it in a run."""

import os
import time
from pathlib import Path

from zaya_jax.aegis.events import EventLog
from zaya_jax.aegis.failure import Severity
from zaya_jax.aegis.file_worker import FileWorker
from zaya_jax.aegis.state import write_state
from zaya_jax.run.manifest import Manifest, write_manifest
from zaya_jax.run.metrics import DiskGuard, JsonlFile

ROOT = Path(__file__).parents[2]
NODE = "node-0"


def metrics_row(step: int) -> dict:
    return {
        "step": step, "phase": "train", "tokens_seen": 100 * step, "loss": 5.0 - step / 10, "grad_norm": 0.5,
        "learning_rate": 0.02, "tokens": 90.0, "skipped": 0, "load_entropy": [0.9, 0.7], "max_load": [1.5, 2.5],
        "skip_rate": [0.0, 0.1], "bias_range": [0.25, 0.125],
    }  # fmt: skip


def timings_row(step: int) -> dict:
    return {"step": step, "seconds": 0.5, "data_wait": 0.1, "tokens_per_second": 180.0, "flops_per_second": 1e12,
            "mfu": 0.25}  # fmt: skip


def write_rows(run_dir: Path, steps: int, **changes) -> None:
    """`steps` rows; `changes` are made to the last one."""
    for name, make in (("metrics.jsonl", metrics_row), ("timings.jsonl", timings_row)):
        file = JsonlFile(run_dir / name, 0, 0, DiskGuard(print))
        for step in range(1, steps + 1):
            row = make(step)
            file.append(row | {key: value for key, value in changes.items() if key in row and step == steps})
        file.close()


def save_checkpoint(run_dir: Path, step: int, age: float) -> None:
    """A checkpoint without arrays that was finished `age` seconds ago."""
    folder = run_dir / "checkpoints" / str(step)
    folder.mkdir(parents=True)
    write_manifest(folder, Manifest(step, 1, {}, {}, {}, {}, read_back=True))
    for path in folder.iterdir():
        os.utime(path, (time.time() - age,) * 2)


def write_node(run_dir: Path, node: str = NODE, **state) -> None:
    """A node whose first attempt crashed at once and whose second one runs, unless `state` says otherwise."""
    folder = run_dir / "aegis" / node
    folder.mkdir(parents=True)
    log = EventLog(folder, node, FileWorker())
    log.attempt = 1
    log.write("start", "attempt")
    detected = log.write("detect", "exit-1", severity=Severity.ERROR, fault="crash", rank=0, step=7)
    log.write("end", "gpu-lost", cause=detected, fault="gpu", times={"start": 0.0}, first_step=0, last_step=7)
    log.write("detect", "gpu-throttled", fault="gpu")  # no more than a sign
    log.write("decide", "rules.gpu", cause=detected, log_only="replace_node")
    log.write("decide", "restart", cause=detected, fault="gpu", action="fewer_devices")
    log.attempt = 2
    log.write("start", "attempt")
    log.write("decide", "restart.per_hour", action="exit-budget_spent")
    log.close()
    ranks = [{"rank": rank, "pid": 1, "exit_status": None, "phase": "device_wait", "step": 20, "loss": 3.0}
             for rank in range(2)]  # fmt: skip
    write_state(folder, **({"attempt": 2, "state": "running", "ranks": ranks} | state))


def make_run(run_dir: Path) -> Path:
    """A run of two nodes: one trains, one was given up."""
    run_dir.mkdir(parents=True)
    write_rows(run_dir, 20)
    save_checkpoint(run_dir, 10, age=500.0)
    save_checkpoint(run_dir, 20, age=60.0)
    (run_dir / "checkpoints" / "30").mkdir()  # not finished
    write_node(run_dir)
    write_node(run_dir, "node-1", state="ended", exit_code=93, why="no", ranks=[])
    nodes = [{"node": 0, "name": NODE, "state": "running", "rank": 0},
             {"node": 2, "name": "node-2", "state": "ready", "rank": None, "held": 20}]  # fmt: skip
    write_state(run_dir / "aegis", state="running", attempt=2, why="", needed=1, nodes=nodes,
                lost={"1": "node-1 left with exit code 93: no"}, strangers=1)  # fmt: skip
    return run_dir
