"""`transformers` → here → `transformers` and back, over the legacy layout too: equal tensors, equal logits."""

import dataclasses
import random

import jax.numpy as jnp
import numpy as np
import pytest

from tests.checkpoint.saved_helpers import bits
from tests.helpers import assert_close
from tests.parity.test_reference import BASE, random_reference
from zaya_jax import load_model, logits
from zaya_jax.hf.exporter import read_arrays, write_folder
from zaya_jax.model import tree

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


def draw(seed):
    """A small architecture at random."""
    rng = random.Random(seed)
    kv, pattern = rng.choice([1, 2, 3]), rng.choice([("full",), ("full", "sliding"), ("sliding", "full", "full")])
    return dataclasses.replace(
        BASE, vocab_size=rng.randint(50, 99), hidden_size=rng.choice([40, 48]), num_kv_heads=kv,
        num_query_heads=kv * rng.randint(1, 4), head_dim=rng.choice([8, 16]), num_experts=rng.randint(2, 6),
        expert_size=rng.choice([24, 32]), router_size=rng.choice([12, 16]), layer_pattern=pattern,
        num_layers=len(pattern) * rng.randint(1, 2), sliding_window=rng.randint(2, 6), sliding_rope_base=500.0,
        depthwise_kernel=rng.randint(1, 3), grouped_kernel=rng.randint(1, 3), attention_bias=rng.random() < 0.5,
        head_bias=rng.random() < 0.5, rotary_fraction=rng.choice([0.5, 1.0]),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("seed", range(8))
def test_folders_go_round(seed, dtype, tmp_path):
    config = draw(seed)
    reference = random_reference(config, seed).to(getattr(torch, dtype))
    for layer in reference.model.layers:  # which stays fp32 in a folder that was trained
        layer.mlp.gate.balancing_biases.data = layer.mlp.gate.balancing_biases.data.float()
    reference.save_pretrained(tmp_path / "theirs", max_shard_size="20KB" if seed % 2 else "1GB")
    source, models = tmp_path / "theirs", []
    for name, layout in (("legacy", "legacy"), ("ours", "hf")):
        models.append(load_model(f"hf:{source}", None)[0])
        values = {**tree.parameters(models[-1]), **tree.balancing_biases(models[-1])}
        source = tmp_path / name
        write_folder(source, models[-1].config, read_arrays(values), dtype, layout, max_shard_bytes=30_000)
    assert bits(tmp_path / "ours") == bits(tmp_path / "theirs")

    tokens = np.random.default_rng(seed).integers(0, config.vocab_size, (2, 9))
    first, second = (np.asarray(logits(model, jnp.asarray(tokens))) for model in models)
    np.testing.assert_array_equal(first, second)
    read = [
        transformers.ZayaForCausalLM.from_pretrained(
            tmp_path / name, output_loading_info=True, attn_implementation="eager", dtype=getattr(torch, dtype)
        )
        for name in ("theirs", "ours")
    ]
    for _, report in read:
        assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        expected, result = (model(torch.tensor(tokens)).logits for model, _ in read)
    # The tensors are equal to the bit; where they lie in memory decides which instructions PyTorch takes.
    assert_close(result.float().numpy(), expected.float().numpy(), 1e-5 if dtype == "float32" else 2e-2)
