"""A sharded folder of 2 GB, both ways in both layouts, and the import of one of ZAYA1-8B's size: bytes and memory."""

import json
import os
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.helpers import tiny_config
from tests.train_helpers import ROOT
from zaya_jax.config import load_config
from zaya_jax.hf.folder import open_folder

SHARD = 500_000_000  # bytes
# 1.04 billion parameters, the embedding the largest tensor.
CONFIG = tiny_config(
    vocab_size=131_072, hidden_size=1024, num_layers=18, num_query_heads=8, num_kv_heads=2, head_dim=64, num_experts=16,
    expert_size=1024, router_size=128, layer_pattern=("full", "sliding"), sliding_window=64,
)  # fmt: skip
CONFIGS = {"2GB": CONFIG, "8B": load_config(ROOT / "configs" / "zaya1_8b.yaml").model}
# Runs in a process of its own, so that a peak is of one direction. On a CPU the device's arrays are the host's too.
PROCESS = """
import json, re, sys
from pathlib import Path
import jax, jax.numpy as jnp, ml_dtypes, numpy as np
from tests.soak.test_hf_memory import CONFIGS, SHARD
from zaya_jax.checkpoint.__main__ import main
from zaya_jax import load_model
from zaya_jax.hf.exporter import read_arrays, write_folder
from zaya_jax.model import tree

def peak():
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", status).group(1))

jax.block_until_ready(jnp.ones(3) + 1)  # the backend is up
verb, source, target, layout, size = sys.argv[1:]
CONFIG, SHARD = CONFIGS[size], SHARD if size == "2GB" else 10 * SHARD
Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # or the peak is that of who started this process
before = peak()
if verb == "draw":
    rng = np.random.default_rng(0)
    shapes = tree.shapes(jax.eval_shape(lambda: __import__("zaya_jax").Zaya(CONFIG, jax.random.key(0))))
    biases = jax.eval_shape(lambda: tree.balancing_biases(__import__("zaya_jax").Zaya(CONFIG, jax.random.key(0))))
    shapes |= {name: x.shape for name, x in biases.items()}
    def read(name, group):
        shape = shapes[name] if group is None else shapes[name][1:]
        if name.endswith("balancing_bias"):
            return rng.random(shape, np.float32)
        return rng.integers(0x3c00, 0x3f80, shape, np.uint16).view(ml_dtypes.bfloat16)
    write_folder(target, CONFIG, read, "bfloat16", layout, max_shard_bytes=SHARD)
    print(json.dumps({"write": peak() - before}))
elif verb in ("import-hf", "export-hf"):
    more = ["--output", target] if verb == "import-hf" else [target, "--dtype", "bfloat16"]
    assert main([verb, source, *more]) == 0
    print(json.dumps({verb: peak() - before}))
else:
    model = jax.block_until_ready(load_model(f"hf:{source}", None)[0])
    values = {**tree.parameters(model), **tree.balancing_biases(model)}
    own = sum(x.nbytes for x in values.values())
    imported = peak() - before - own
    write_folder(target, CONFIG, read_arrays(values), "bfloat16", layout, max_shard_bytes=SHARD)
    print(json.dumps({"model": own, "import": imported, "import and export": peak() - before - own}))
"""


def run(*arguments, size="2GB", limit=290):
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    command = [sys.executable, "-c", PROCESS, *map(str, arguments), size]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=limit, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.soak
def test_two_gigabytes_both_ways_take_a_tensor_and_a_gibibyte(tmp_path):
    result = {"write": run("draw", "", tmp_path / "first", "hf")}
    result["legacy"] = run("copy", tmp_path / "first", tmp_path / "second", "legacy")
    assert open_folder(tmp_path / "second").legacy
    result["hf"] = run("copy", tmp_path / "second", tmp_path / "third", "hf")
    shutil.rmtree(tmp_path / "second")
    result["to a run"] = run("import-hf", tmp_path / "first", tmp_path / "run", "hf")
    result["of a run"] = run("export-hf", tmp_path / "run", tmp_path / "fourth", "hf")
    first, third, fourth = (open_folder(tmp_path / name) for name in ("first", "third", "fourth"))
    assert sum(path.stat().st_size for path in (tmp_path / "first").glob("*.safetensors")) > 2e9
    assert len(list((tmp_path / "first").glob("*.safetensors"))) > 3
    for other in (third, fourth):
        assert first.stored.keys() == other.stored.keys()
        for name, one in first.stored.items():
            assert np.array_equal(one.open().view(np.uint8), other.stored[name].open().view(np.uint8)), name
    largest = max(one.bytes for one in first.stored.values())
    print(json.dumps({"largest tensor": largest, **result}))
    for peaks in result.values():
        for what, peak in peaks.items():
            assert what == "model" or peak <= largest + 2**30, (what, peak)


@pytest.mark.soak
def test_a_folder_of_the_released_size_is_imported(tmp_path):
    if shutil.disk_usage(tmp_path).free < 60e9:
        pytest.skip("needs 60 GB of disk")
    run("draw", "", tmp_path / "folder", "hf", size="8B", limit=3600)
    files = list((tmp_path / "folder").glob("*.safetensors"))
    start = time.perf_counter()
    result = run("import-hf", tmp_path / "folder", tmp_path / "run", "hf", size="8B", limit=3600)
    seconds, size = time.perf_counter() - start, sum(path.stat().st_size for path in files)
    print(json.dumps({"files": len(files), "bytes": size, "import seconds": round(seconds), **result}))
    assert size > 17.6e9
    assert len(files) == 4
    largest = max(one.bytes for one in open_folder(tmp_path / "folder").stored.values())
    assert result["import-hf"] <= 2 * largest + 2**28
