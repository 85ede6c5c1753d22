"""Runs to report on: one that was trained, and one of two phases that is made from its rows."""

import json
import shutil
from pathlib import Path

from tests.aegis.metrics_helpers import write_node
from tests.trained_helpers import trained_run
from zaya_jax.config import from_dict, to_yaml
from zaya_jax.run.folder import read_config
from zaya_jax.run.metrics import read_rows

SOURCES = ("code", "web")
BY_ROLE = ("expert_counts", "grad_norm_by_role", "update_norm_by_role", "loss_by_source")


def corpus_run(base: Path, folder: Path) -> Path:
    """A run of one phase over text, which compressors read, too; `base` as in `trained_run`."""
    return Path(shutil.copytree(trained_run(base).folder, folder / "run"))


def phased_run(run: Path, folder: Path) -> Path:
    """A run of two phases over two sources, some of whose steps were skipped, as training would have written it."""
    phased = Path(shutil.copytree(run, folder / "phased"))
    tree = read_config(run)
    (phase,) = tree["phases"]
    tree |= {"run_dir": str(phased), "phases": [
        phase | {"name": "wide", "tokens": 10 * 128}, phase | {"name": "narrow", "tokens": 8 * 128},
    ]}  # fmt: skip
    tree["data"] |= {"corpus": "stdlib", "sources": {name: {"path": str(folder / name)} for name in SOURCES}}
    tree["train"] |= {"log_every": 2}
    (phased / "config.yaml").write_text(to_yaml(from_dict(tree)))
    rows, timings = ([row | {"step": step} for step, row in enumerate([*old, *old[:6]], 1)]
                     for old in (read_rows(run / name) for name in ("metrics.jsonl", "timings.jsonl")))  # fmt: skip
    for row in rows:
        step = row["step"]
        row |= {"phase": "wide" if step <= 10 else "narrow", "tokens_seen": 128 * step,
                "loss_by_source": {name: row["loss"] + index for index, name in enumerate(SOURCES)}}  # fmt: skip
        row.pop("heldout_loss", None)
        if step in (6, 10, 12, 18):
            by_source = {name: 6 - step / 10 + index for index, name in enumerate(SOURCES)}
            row |= {"heldout_loss": sum(by_source.values()) / 2, "heldout_loss_by_source": by_source}
        if step in (9, 15):
            row |= {"skip": "gradient spike", "skipped": 1, "rows": [4 * step, 4 * step + 4]}
        if step % 2:
            for key in BY_ROLE:
                del row[key]
    for name, new in (("metrics.jsonl", rows), ("timings.jsonl", timings)):
        (phased / name).write_text("".join(json.dumps(row) + "\n" for row in new))
    summary = json.loads((run / "summary.json").read_text())
    text = summary["heldout_by_source"]["corpus"]
    summary |= {"steps": 18, "heldout_by_source": dict.fromkeys(SOURCES, text), "baselines": {}}
    (phased / "summary.json").write_text(json.dumps(summary))
    return phased


def supervised(run: Path) -> Path:
    """The run with what supervisors of two nodes wrote."""
    write_node(run, state="ended", exit_code=0, why="finished", ranks=[])
    write_node(run, "node-1")
    return run
