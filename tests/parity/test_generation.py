"""Greedy continuations equal those of `generate` of `transformers`, for ragged prompts of random models."""

import jax
import numpy as np
import pytest

from tests.generate.test_decode import model
from zaya_jax.generate.decode import generate_tokens
from zaya_jax.hf.exporter import save_pretrained

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
STEPS = 16


@pytest.mark.parametrize("seed", [0, 1])
def test_greedy_continuations_are_those_of_transformers(tmp_path, seed):
    ours = model()
    if seed:  # other weights
        spread = [x if x.ndim < 2 else x + 0.1 * jax.random.normal(jax.random.key(seed + i), x.shape)
                  for i, x in enumerate(jax.tree.leaves(ours))]  # fmt: skip
        ours = jax.tree.unflatten(jax.tree.structure(ours), spread)
    save_pretrained(ours, tmp_path / "model")
    peer = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", attn_implementation="eager", dtype=torch.float32
    )
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, ours.config.vocab_size, length).tolist() for length in rng.integers(1, 40, 24)]
    rows = generate_tokens(ours, prompts, STEPS)
    for prompt, row in zip(prompts, rows, strict=True):
        tokens = torch.tensor([prompt])
        out = peer.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=STEPS,
                            min_new_tokens=STEPS, do_sample=False, pad_token_id=0)  # fmt: skip
        assert out[0, len(prompt) :].tolist() == row.tokens
