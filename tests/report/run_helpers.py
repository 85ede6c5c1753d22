"""Short real runs to report on."""

import random
from pathlib import Path

import yaml

from tests.aegis.metrics_helpers import write_node
from tests.data_helpers import VOCAB, write_source
from tests.train_helpers import run_tree, small_run, trained
from zaya_jax.config import Config, load_config
from zaya_jax.train.report import report


def train(config: Config) -> Path:
    """Train and return the run folder, with all that the command `zaya train` writes."""
    _, result = trained(config)
    report(config, result)
    return result.run_dir


def corpus_run(folder: Path) -> Path:
    """A run of one phase over text, which compressors read, too."""
    return train(small_run(folder, "train.log_every=1"))


def phased_run(folder: Path, name: str = "run") -> Path:
    """A run of two phases over two sources."""
    rng = random.Random(0)
    for source in ("web", "code"):
        train_part, heldout = ([[rng.randrange(1, VOCAB) for _ in range(60)] for _ in range(n)] for n in (80, 8))
        write_source(folder / source, train_part, heldout)
    tree = run_tree(folder, name)
    tree["data"] = {"sources": {source: {"path": str(folder / source)} for source in ("web", "code")}, "context": 32,
                    "cache_dir": str(folder / "cache")}  # fmt: skip
    tree["phases"] = [{"name": "wide", "tokens": 10 * 128, "schedule": {"warmup_tokens": 256}},
                      {"name": "narrow", "tokens": 8 * 128, "mixture": {"web": 3, "code": 1},
                       "schedule": {"shape": "linear", "final": 0.0}}]  # fmt: skip
    tree["train"]["log_every"] = 2
    tree["train"]["spike"] = {"window": 4, "threshold": 0.5}  # so low that steps are skipped
    tree["train"]["max_skipped_steps"] = 18
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return train(load_config(path))


def supervised(run: Path) -> Path:
    """The run with what supervisors of two nodes wrote."""
    write_node(run, state="ended", exit_code=0, why="finished", ranks=[])
    write_node(run, "node-1")
    return run
