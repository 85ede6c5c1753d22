"""Tries the recipes of docs/guide.md in a copy of the code that has all of them; run by test_guide.py.

Usage: python tests/guide_checks.py FOLDER, with the copy in FOLDER and before everything else on the path.
"""

import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import zaya_jax
from tests.kernel_helpers import with_kernel
from tests.train_helpers import MODEL, change, small_run
from zaya_jax.aegis.training_command import fits
from zaya_jax.config import OptimizerConfig, load_config
from zaya_jax.config.optimizer import LionConfig
from zaya_jax.data.__main__ import main as data_command
from zaya_jax.errors import ExitCode
from zaya_jax.hardware.data_sheets import HARDWARE, find_hardware
from zaya_jax.hardware.presets import PRESETS
from zaya_jax.lab.predict.compilers.gpus import GPUS, target_config
from zaya_jax.lab.predict.dry_run.estimate import simulated_programs
from zaya_jax.model.experts import rows_per_token
from zaya_jax.model.layers import MATRIX_ROLES
from zaya_jax.model.zaya import Zaya
from zaya_jax.ops.gram_polynomial import gram_polynomial
from zaya_jax.optim.build import make_optimizer
from zaya_jax.parallel.storage import storage_rows
from zaya_jax.train.fit import run_training

FOLDER = Path(sys.argv[1])
POSTED = []


class Receiver(BaseHTTPRequestHandler):
    def do_POST(self):
        POSTED.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


def check_training():
    """Optimizer, attention, layer pattern, router, top-k, metric, sink and evaluation in one run."""
    server = HTTPServer(("127.0.0.1", 0), Receiver)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    os.environ["METRICS_URL"] = f"http://127.0.0.1:{server.server_port}"
    overrides = ["optimizer.matrices=lion", "model.attention=nope", "model.layer_pattern=[full, gqa]",
                 "model.router=sigmoid", "model.experts_per_token=2", "phases.0.tokens=384", "evaluation.every=2",
                 "sample.tokens=0"]  # fmt: skip
    result = run_training(small_run(FOLDER, *overrides))
    rows = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == len(POSTED) == 3
    assert all(row["parameter_norm"] > 0 for row in rows)
    assert 0 < rows[1]["text_loss"] < 20


def check_optimizer():
    weights = {"matrix": jnp.zeros((4, 4))}
    config = OptimizerConfig(matrices="lion", lion=LionConfig(learning_rate=0.5, weight_decay=0.0))
    transform = make_optimizer(config, {"matrix": "expert"}, {"matrix": 1})
    gradient = {"matrix": jnp.arange(16.0).reshape(4, 4) - 7.5}
    update, _ = transform.update(gradient, transform.init(weights), weights)
    np.testing.assert_array_equal(update["matrix"], -0.5 * np.sign(gradient["matrix"]))


def check_model():
    tokens = jnp.asarray([[1, 2, 3, 4]])
    model = change(MODEL, {"attention": "nope", "router": "sigmoid", "experts_per_token": 2})
    near, far = (Zaya(model, jax.random.key(0))(tokens, positions=tokens * step) for step in (1, 9))
    np.testing.assert_array_equal(near.hidden_bsd, far.hidden_bsd)
    assert np.asarray(near.stats.expert_counts_le).sum(-1).ravel().tolist() == [2 * 4] * 2
    assert [kind.attention for kind in change(MODEL, {"layer_pattern": ("full", "gqa")}).layer_kinds] == ["cca", "gqa"]
    assert rows_per_token(model) == 2


def check_data():
    path = FOLDER / "table.tsv"
    path.write_text("text\tnumber\nfirst text\t1\n\t2\nthird text\t3\n")
    arguments = ["--output", str(FOLDER / "prepared"), "--tokenizer", str(FOLDER / "run" / "tokenizer")]
    assert data_command(["prepare", "--input", str(path), *arguments]) == ExitCode.BAD_INPUT  # the empty row
    assert data_command(["prepare", "--input", str(path), *arguments, "--max-bad", "1"]) == 0
    assert json.loads((FOLDER / "prepared" / "manifest.json").read_text())["train"]["documents"] == 2


def check_kernel():
    x = jax.random.normal(jax.random.key(0), (2, 48, 96))
    arrays = x, jnp.float32(-4.775), jnp.float32(2.0315), jnp.full(2, 0.01)
    half = with_kernel("interpret", "gram_polynomial", "half").implementation("gram_polynomial")
    np.testing.assert_allclose(half(*arrays), gram_polynomial(*arrays), rtol=1e-4, atol=1e-5)


def check_accelerator():
    assert find_hardware("AMD Instinct MI325X") is HARDWARE["mi325x"]
    assert PRESETS["mi325x"].peer_timeout == PRESETS["mi300x"].peer_timeout
    assert GPUS["mi325x"].architecture in target_config("mi325x")


def check_axis():
    config = load_config("configs/tiny.yaml", ["parallel.replica=2", "parallel.fsdp=2", "train.batch.tokens=24576"])
    program = simulated_programs(config, 12)[0]
    matrices = [leaf for leaf in program.placement.leaves.values() if leaf.role in MATRIX_ROLES]
    assert matrices
    assert all(leaf.by_layer and "replica" not in leaf.split for leaf in matrices)
    rows = storage_rows(program.placement, program.abstract_state)
    assert all("replica" in row.replicated_over for row in rows)
    assert [fits(config, devices) for devices in (2, 4, 6, 12)] == [False, True, False, True]


if __name__ == "__main__":
    assert Path(zaya_jax.__file__).is_relative_to(FOLDER)
    for check in (
        check_model,
        check_optimizer,
        check_kernel,
        check_accelerator,
        check_axis,
        check_training,
        check_data,
    ):
        check()
