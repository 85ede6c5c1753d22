"""Exports hold the tensors that vLLM's `zaya` model loads: no other, since it raises on any, and every one it needs.

The names are those of vllm-project/vllm, vllm/model_executor/models/zaya.py and layers/mamba/cca.py at commit 15aac33e:
`load_weights` takes the model's own parameters and balancing biases, the experts of a layer as two tensors, and the
key temperature under its name in `transformers`. A tied head is not stored.
"""

import json

import jax
import pytest
from safetensors import safe_open

from tests.helpers import VARIANTS, random_values, tiny_config
from zaya_jax.config import load_config
from zaya_jax.hf.exporter import read_arrays, write_folder
from zaya_jax.hf.folder import INDEX
from zaya_jax.hf.tensors import tensors

MODEL = ("embed_tokens.weight", "norm.weight", "input_hidden_states_scale", "input_hidden_states_bias")
SCALING = ("hidden_states_scale", "hidden_states_bias", "residual_scale", "residual_bias")
PROJECTIONS = ("qkv_proj.q_proj", "qkv_proj.k_proj", "qkv_proj.v_proj_current", "qkv_proj.v_proj_delayed", "o_proj")
CONVOLUTIONS = ("qkv_proj.conv_qk_depthwise", "qkv_proj.conv_qk_grouped")
LAYER = {
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "self_attn.qk_norm.temp",
    *(f"self_attn.{name}.weight" for name in (*PROJECTIONS, *CONVOLUTIONS)),
    *(f"self_attn.{name}.bias" for name in CONVOLUTIONS),
    *(f"post_{part}_residual_scale.{name}" for part in ("attention", "mlp") for name in SCALING),
    *(f"mlp.gate.{name}.{kind}" for name in ("down_proj", "router_mlp.fc1", "router_mlp.fc2")
      for kind in ("weight", "bias")),
    "mlp.gate.router_mlp.norm.weight",
    "mlp.gate.router_mlp.out_proj.weight",
    "mlp.gate.balancing_biases",
    "mlp.experts.gate_up_proj",
    "mlp.experts.down_proj",
}  # fmt: skip


def names_in_vllm(config: dict) -> set[str]:
    """All names that vLLM loads with this `config.json`, each of which it needs."""
    names = {f"model.{name}" for name in MODEL} | ({"lm_head.bias"} if config["lm_head_bias"] else set())
    for index in range(config["num_hidden_layers"]):
        layer = LAYER | ({"mlp.gate.router_states_scale"} if index else set())
        layer |= {f"self_attn.{name}.bias" for name in PROJECTIONS if config["attention_bias"]}
        names |= {f"model.layers.{index}.{name}" for name in layer}
    return names


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_an_export_has_the_tensors_that_vllm_loads_and_no_other(variant, shards, tmp_path):
    config = tiny_config(variant)
    most = 12_000 if shards else 10**9
    values = jax.device_get(random_values(config))
    write_folder(tmp_path / "model", config, read_arrays(values), "bfloat16", max_shard_bytes=most)
    described = json.loads((tmp_path / "model" / "config.json").read_text())
    names: list[str] = []
    for path in (tmp_path / "model").glob("*.safetensors"):
        with safe_open(path, "numpy") as file:
            names += file.keys()
    assert len(names) == len(set(names))
    assert set(names) == names_in_vllm(described)
    if shards:
        assert json.loads((tmp_path / "model" / INDEX).read_text())["weight_map"].keys() == set(names)
    # What its constructor and `load_weights` assume.
    assert described["tie_word_embeddings"] is True
    assert described["num_experts_per_tok"] == 1
    assert len(described["layer_types"]) == described["num_hidden_layers"]


@pytest.mark.parametrize("path", ["configs/zaya1_8b.yaml", "configs/zaya1_74b.yaml"])
def test_so_have_the_released_sizes(path):
    config = load_config(path).model
    names = [tensor.name for tensor in tensors(config)]
    assert len(names) == len(set(names))
    assert set(names) == names_in_vllm({"lm_head_bias": config.head_bias, "attention_bias": config.attention_bias,
                                        "num_hidden_layers": config.num_layers})  # fmt: skip
