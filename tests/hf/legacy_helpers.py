"""Folders in the layout of the first release, which is read and no longer written."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zaya_jax.config import ModelConfig
from zaya_jax.hf.exporter import Read, read_arrays, write_tensors
from zaya_jax.hf.legacy_config import _FIXED
from zaya_jax.hf.tensors import legacy_tensors
from zaya_jax.model.tree import balancing_biases, parameters
from zaya_jax.model.zaya import Zaya
from zaya_jax.run.files import json_text

KEYS = {  # theirs: ours
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_query_heads",
    "num_key_value_heads": "num_kv_heads",
    "num_query_groups": "num_kv_heads",
    "head_dim": "head_dim",
    "kv_channels": "head_dim",
    "num_experts": "num_experts",
    "zaya_mlp_expansion": "router_size",
    "max_position_embeddings": "max_positions",
    "cca_time0": "depthwise_kernel",
    "cca_time1": "grouped_kernel",
    "swa_rotary_base": "sliding_rope_base",
    "rope_theta": "rope_base",
    "partial_rotary_factor": "rotary_fraction",
    "attention_bias": "attention_bias",
    "lm_head_bias": "head_bias",
    "norm_epsilon": "norm_eps",
    "initializer_range": "init_std",
}


def to_legacy(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """The content of a `config.json` in the released 8B's dialect."""
    pattern = config.period * config.num_groups
    back = (config.sliding_window or 1) - 1
    windows = [tokens for kind in pattern for tokens in (back * (kind == "sliding"), 0)]
    return {
        "architectures": ["ZayaForCausalLM"],
        "model_type": "zaya",
        "dtype": dtype,
        **{key: values[0] for key, values in _FIXED.items()},
        **{key: getattr(config, ours) for key, ours in KEYS.items()},
        "num_hidden_layers": 2 * config.num_layers,
        "ffn_hidden_size": 2 * config.expert_size,
        "swa_layers": windows if "sliding" in pattern else None,
        "sliding_window": None,  # given by swa_layers
        "residual_in_fp32": True,
        "zaya_high_prec": True,
    }


def write_legacy_folder(folder: Path, config: ModelConfig, read: Read, dtype: Any = "float32") -> None:
    """Write a model as `write_folder` does, in the legacy layout."""
    kind = np.dtype(jnp.dtype(dtype))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json_text(to_legacy(config, kind.name)))
    write_tensors(folder, {"model.safetensors": list(legacy_tensors(config))}, read, kind)


def save_legacy(model: Zaya, folder: Path) -> None:
    """Write a model as `save_pretrained` does, in the legacy layout."""
    values = jax.device_get({**parameters(model), **balancing_biases(model)})
    write_legacy_folder(folder, model.config, read_arrays(values), model.dtype)
