"""Forward and gradients against `transformers`' own ZAYA, and folders both read."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from zaya_jax import Zaya, load_model, logits, save_pretrained
from zaya_jax.config import ModelConfig
from zaya_jax.hf.config import to_hf
from zaya_jax.hf.tensors import tensors

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

BASE = ModelConfig(
    vocab_size=97, hidden_size=48, num_layers=3, num_query_heads=4, num_kv_heads=2, head_dim=16, num_experts=4,
    expert_size=32, router_size=16, max_positions=64, rope_base=1.0e4,
)  # fmt: skip
CONFIGS = {
    "plain": {},
    "one_head": {"num_query_heads": 1, "num_kv_heads": 1},
    "eight_to_one": {"num_query_heads": 8, "num_kv_heads": 1},
    "odd_heads": {"num_query_heads": 9, "num_kv_heads": 3, "num_layers": 2},
    "sliding": {"layer_pattern": ("full", "sliding"), "num_layers": 4, "sliding_window": 5, "sliding_rope_base": 500.0},
    "no_period": {"layer_pattern": ("sliding", "full", "full"), "sliding_window": 3},
    "kernels": {"depthwise_kernel": 4, "grouped_kernel": 3},
    "kernel_one": {"depthwise_kernel": 1, "grouped_kernel": 1},
    "attention_bias": {"attention_bias": True, "depthwise_kernel": 3},
    "head_bias": {"head_bias": True, "rotary_fraction": 1.0, "num_experts": 7},
}


def random_reference(config: ModelConfig, seed: int):
    """A `transformers` model with every parameter and bias drawn at random, skip winning in some layers."""
    torch.manual_seed(seed)
    tree = to_hf(config, "float32")
    tree.pop("architectures")
    reference = transformers.ZayaForCausalLM(transformers.ZayaConfig(**tree, attn_implementation="eager")).eval()
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if name.endswith(("scale", "norm.weight", "layernorm.weight", "temp")):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.2)
            elif "gate" in name:
                parameter.normal_(0, 0.35)
            else:
                parameter.normal_(0, 0.15)
        for index, layer in enumerate(reference.model.layers):
            bias = torch.randn(config.num_experts + 1) * 0.05
            bias[-1] = 0.4 if index == 1 else -1.0 if index else 0.05
            layer.mlp.gate.balancing_biases.copy_(bias)
    return reference


def theirs_to_ours(reference, folder, config: ModelConfig) -> Zaya:
    reference.save_pretrained(folder)
    model = load_model(f"hf:{folder}")[0]
    assert dataclasses.replace(model.config, layer_pattern=model.config.period) == dataclasses.replace(
        config, layer_pattern=config.period
    )
    return model


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_gradients(name, tmp_path):
    config = dataclasses.replace(BASE, **CONFIGS[name])
    reference = random_reference(config, seed=len(name))
    model = theirs_to_ours(reference, tmp_path / "theirs", config)
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, (2, 23))
    expected = reference(torch.tensor(tokens)).logits
    counts = model(jnp.asarray(tokens)).stats.expert_counts_le
    assert counts[1, -1] > 0, "the skip class wins somewhere, or the case shows too little"

    def loss(model):
        out = logits(model, jnp.asarray(tokens))
        log_p = jax.nn.log_softmax(out[:, :-1])
        return -jnp.take_along_axis(log_p, jnp.asarray(tokens)[:, 1:, None], -1).mean(), out

    (value, ours), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True, allow_int=True))(model)
    error = np.abs(ours - expected.detach().numpy()).max() / expected.abs().max().item()
    assert error < 1e-5

    labels = torch.tensor(tokens)
    flat = expected[:, :-1].reshape(-1, config.vocab_size)
    theirs = torch.nn.functional.cross_entropy(flat, labels[:, 1:].reshape(-1))
    np.testing.assert_allclose(value, theirs.item(), rtol=1e-5)
    theirs.backward()
    save_pretrained(gradient, tmp_path / "gradient")
    ours_by_name = load_file(tmp_path / "gradient" / "model.safetensors")
    checked = 0
    for key, parameter in reference.named_parameters():
        if key == "lm_head.weight":
            continue
        want = parameter.grad.numpy()
        difference = np.linalg.norm(ours_by_name[key] - want)
        assert difference <= 1e-4 * max(np.linalg.norm(want), 1e-6), key
        checked += 1
    assert checked == sum(1 for t in tensors(config) if not t.name.endswith("balancing_biases"))


def test_bf16_follows_the_reference_on_the_same_route(tmp_path):
    config = dataclasses.replace(BASE, num_layers=2)
    reference = random_reference(config, seed=3)
    theirs_to_ours(reference, tmp_path / "theirs", config)
    model = load_model(f"hf:{tmp_path / 'theirs'}", dtype=jnp.bfloat16)[0]
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, (2, 16))
    expected = reference(torch.tensor(tokens)).logits.detach().numpy()
    ours = np.asarray(logits(model, jnp.asarray(tokens)))
    # A token whose choice of expert flips under rounding goes elsewhere; nearly all must not.
    close = np.abs(ours - expected).max(-1) / np.abs(expected).max() < 0.05
    assert close.mean() > 0.9
