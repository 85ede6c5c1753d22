"""A run of adapters on disk, as training leaves it."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np

from tests.data_helpers import small_tokenizer
from tests.helpers import random_model
from tests.train_helpers import CONFIG, MODEL
from zaya_jax import load_model, save_pretrained
from zaya_jax.checkpoint.store import CheckpointStore
from zaya_jax.config import CheckpointConfig, LoraConfig, to_dict
from zaya_jax.model import tree
from zaya_jax.model.fingerprint import fingerprint
from zaya_jax.model.lora import adapter_shapes, merged
from zaya_jax.model.tree import roles, shapes
from zaya_jax.run.checkpoints import CHECKPOINTS
from zaya_jax.weights.load import BASE

LORA = LoraConfig(2, 3.0)


def write_adapter_run(folder):
    """Write a base model to `model`, adapters of it to `run`; returns the merged parameters of its steps 4 and 3."""
    save_pretrained(jax.device_get(random_model(MODEL, 1)), folder / "model")
    small_tokenizer().save(folder / "model" / "tokenizer.json")
    base = load_model(f"hf:{folder / 'model'}")[0]
    params, balance = tree.parameters(base), tree.balancing_biases(base)
    config = dataclasses.replace(CONFIG, init_from=f"hf:{folder / 'model'}", lora=LORA)
    note = {"init_from": config.init_from, "fingerprint": fingerprint({**params, **balance})}
    drawn = {step: draw(base, step) for step in (3, 4)}
    with CheckpointStore(folder / "run" / CHECKPOINTS, CheckpointConfig()) as store:
        for step, adapters in drawn.items():
            store.save(step, {"params": adapters, "balance": balance},
                       {"phase": config.phases[0].name, "config": to_dict(config)})  # fmt: skip
    (folder / "run" / BASE).write_text(json.dumps(note))
    (folder / "run" / "tokenizer").mkdir()
    shutil.copy(folder / "model" / "tokenizer.json", folder / "run" / "tokenizer" / "tokenizer.json")
    return [{**merged(params, drawn[step], LORA.scale), **balance} for step in (4, 3)]


def draw(base, seed):
    """Adapters of a model at random."""
    expected, rng = adapter_shapes(shapes(base), roles(base), LORA.rank), np.random.default_rng(seed)
    return {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in sorted(expected.items())}
