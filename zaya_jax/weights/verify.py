"""Check that the released 8B computes the same logits here as in `transformers` (docs/reference.md §12.2)."""

from dataclasses import asdict, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from zaya_jax.config import ModelConfig, load_config
from zaya_jax.config.shipped import shipped
from zaya_jax.errors import InputError
from zaya_jax.model.zaya import Zaya, logits
from zaya_jax.weights.sources import FolderWeights

# "Hello! How can I assist you today?", encoded by the released tokenizer.
PROMPT = (2, 9259, 236888, 2088, 740, 564, 6361, 611, 3124, 236881, 106)
LIKELIEST = (105, 9731, 107, 740, 564, 1601, 611, 236881, 236881, 107, 107)
# Logits of the last three classes (which no text uses) at the last three positions.
TAIL = ((0.3613, 0.3633, 0.3633), (-1.3672,) * 3, (-2.875,) * 3)
# bf16 has 8 bits of precision, a spacing of 0.016 at 2.875; 40 layers add in a different order.
TOLERANCE = 0.1
_OF_NO_MATTER = ("max_positions", "init_std", "sliding_rope_base", "sliding_window")


def verify_hf(source: str | Path) -> tuple[list[str], bool]:
    """Run the fixture of `transformers`' own test on FOLDER or hf:FOLDER, in either layout and in bf16.

    Returns a report of lines, and whether the logits match. The parameters take 17.7 GB on the device, or on the host
    if there is no accelerator. Raises like `open_folder`; `InputError` for another model, before anything is allocated.
    """
    weights = FolderWeights(source)
    check_released(weights.config, weights.source)
    return compare(weights.load_model(jnp.bfloat16))


def check_released(config: ModelConfig, folder: str) -> None:
    """Raise `InputError` unless `config` is the 8B's, the only model with a fixture; `folder` names the folder."""
    there = replace(config, layer_pattern=config.period)
    for key, value in asdict(load_config(shipped("zaya1_8b.yaml")).model).items():
        if key not in _OF_NO_MATTER and getattr(there, key) != value:
            values = f"{key} is {getattr(there, key)!r}, but {value!r} in the 8B"
            raise InputError(f"{folder} is not ZAYA1-8B, the only model that verify-hf can check: {values}.")


def compare(model: Zaya) -> tuple[list[str], bool]:
    """Run `model` on the prompt; return a report of lines, and whether its logits are the expected ones."""
    out = np.asarray(jax.jit(logits)(model, jnp.asarray([PROMPT], jnp.int32))[0])
    likeliest, error = tuple(out.argmax(-1).tolist()), float(np.abs(out[-3:, -3:] - np.asarray(TAIL)).max())
    good = likeliest == LIKELIEST and error <= TOLERANCE
    lines = [f"{'token':>8} {'next':>10} {'expected':>10}"]
    for token, ours, theirs in zip(PROMPT, likeliest, LIKELIEST, strict=True):
        lines.append(f"{token:>8} {ours:>10} {theirs:>10}{'' if ours == theirs else '  differs'}")
    lines.append(f"logits: max abs diff {error:.4f} (at most {TOLERANCE} is allowed)")
    lines.append("OK: the logits match the released 8B." if good else "The logits differ from the released 8B.")
    return lines, good
