"""An export of a run, as it is: `transformers` loads tokenizer and model and writes what this package writes."""

import pytest

from tests.train_helpers import change, compile_once, small_run
from zaya_jax.checkpoint.__main__ import main
from zaya_jax.generate.decode import generate_tokens
from zaya_jax.train.fit import run_training

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


def test_transformers_continues_a_prompt_as_we_do(tmp_path, monkeypatch):
    compile_once(monkeypatch)
    config = change(small_run(tmp_path), {"optimizer.balance.rule": "none"})  # `transformers` resets one bias
    result = run_training(config)
    assert main(["export-hf", config.run_dir, str(tmp_path / "out"), "--dtype", "float32"]) == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", attn_implementation="eager", dtype=torch.float32
    )
    ours, prompt = result.prepared.tokenizer, "the model reads"
    ids = tokenizer(tokenizer.bos_token + prompt, return_tensors="pt")
    assert ids["input_ids"].tolist() == [[ours.eot, *ours.encode(prompt)]]
    (row,) = generate_tokens(result.model, ids["input_ids"].tolist(), 12, stop_tokens=[ours.eot])
    actual = model.generate(**ids, max_new_tokens=12, do_sample=False)[0, ids["input_ids"].shape[1] :].tolist()
    assert [token for token in actual if token != tokenizer.eos_token_id] == row.tokens
    assert model.generation_config.eos_token_id == model.config.eos_token_id == tokenizer.eos_token_id == ours.eot
