"""A folder of `transformers` fine-tuned on conversations here, whole or by adapters, and back: equal logits."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml

from tests.data_helpers import small_tokenizer
from tests.parity.test_reference import random_reference
from tests.train_helpers import MODEL
from zaya_jax import load_model, logits
from zaya_jax.checkpoint.__main__ import main as checkpoint_main
from zaya_jax.config import load_config, to_dict
from zaya_jax.data.__main__ import main as data_main
from zaya_jax.train.fit import run_training

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
ADAPTERS = {"lora": {"rank": 4, "alpha": 8}}


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """A folder of `transformers` with its tokenizer, and prepared conversations."""
    folder = tmp_path_factory.mktemp("given")
    config = dataclasses.replace(MODEL, max_positions=128)
    reference = random_reference(config, 0)
    for layer in reference.model.layers:  # as `from_pretrained` resets it, whatever was saved (docs/reference.md §12.6)
        layer.mlp.gate.balancing_biases[-1] = -1.0
    reference.save_pretrained(folder / "model")
    small_tokenizer().save(folder / "model" / "tokenizer.json")
    talk = [{"messages": [{"role": "user", "content": f"{n}?"},
                          {"role": "assistant", "content": f"return the value of {n} and {n + 1}"}]}
            for n in range(150)]  # fmt: skip
    (folder / "talk.jsonl").write_text("".join(json.dumps(one) + "\n" for one in talk))
    assert data_main(["prepare", "--input", str(folder / "talk.jsonl"), "--output", str(folder / "talk"), "--chat",
                      "--tokenizer", str(folder / "model" / "tokenizer.json"), "--heldout", "0.2"]) == 0  # fmt: skip
    return folder, config


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("more", [{}, ADAPTERS], ids=["all", "adapters"])
def test_what_is_fine_tuned_here_runs_there(given, tmp_path, more, dtype):
    folder, config = given
    tree = {
        "run_dir": str(tmp_path / "run"), "init_from": f"hf:{folder / 'model'}", "model": to_dict(config),
        "data": {"cache_dir": str(tmp_path / "cache"), "context": 128,
                 "sources": {"talk": {"path": str(folder / "talk")}}},
        "phases": [{"name": "chat", "tokens": 4 * 8 * 128, "mixture": {"talk": 1}, "packing": "bins",
                    "over_length": "trim", "batch": {"tokens": 8 * 128}}],
        "optimizer": {"muon": {"learning_rate": 0.02}, "adamw": {"learning_rate": 0.02}, "balance": {"rule": "none"}},
        "train": {"compute_dtype": dtype}, "sample": {"tokens": 0}, **more,
    }  # fmt: skip
    (tmp_path / "tune.yaml").write_text(yaml.safe_dump(tree))
    result = run_training(load_config(tmp_path / "tune.yaml"))
    target = tmp_path / "tuned"
    assert checkpoint_main(["export-hf", str(tmp_path / "run"), str(target), "--dtype", "float32"]) == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(target)  # of the run, nothing is carried
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "3?"}], add_generation_prompt=True)["input_ids"]
    assert tokenizer.decode(ids) == "<|endoftext|><|im_start|>user\n3?<|im_end|>\n<|im_start|>assistant\n"
    generating = transformers.AutoModelForCausalLM.from_pretrained(target)
    assert tokenizer.eos_token_id == result.prepared.tokenizer.eot
    assert generating.generation_config.eos_token_id == [reference_eos(folder), tokenizer.eos_token_id]
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, 24))
    reference = transformers.ZayaForCausalLM.from_pretrained(target, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        theirs = reference(torch.tensor(tokens)).logits.numpy()
    model = jax.tree.map(lambda x: x.astype(jnp.float32), result.model)
    ours = np.asarray(logits(model, jnp.asarray(tokens)))
    np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-5 * np.abs(theirs).max())
    again = load_model(f"hf:{target}")[0]
    assert not different(again, model)
    assert different(load_model(f"hf:{folder / 'model'}")[0], model)


def reference_eos(folder):
    return json.loads((folder / "model" / "config.json").read_text())["eos_token_id"]


def different(one, other):
    """Names of the parameters in which two models differ."""
    pairs = zip(jax.tree_util.tree_leaves_with_path(one), jax.tree_util.tree_leaves_with_path(other), strict=True)
    return [jax.tree_util.keystr(path) for (path, x), (_, y) in pairs if not np.array_equal(x, y)]
