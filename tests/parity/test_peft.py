"""`peft` loads an exported folder of adapters onto their base, with its tokenizer; logits equal the merged export."""

import numpy as np
import pytest

from tests.helpers import assert_close
from tests.train_helpers import MODEL
from tests.weights.adapter_helpers import write_adapter_run
from zaya_jax.checkpoint.__main__ import main

pytestmark = [
    pytest.mark.parity,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # peft asks for it
]
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")


def test_peft_computes_what_the_merged_export_does(tmp_path):
    write_adapter_run(tmp_path)
    for name, flags in (("peft", ["--peft"]), ("whole", [])):
        assert main(["export-hf", str(tmp_path / "run"), str(tmp_path / name), "--dtype", "float32", *flags]) == 0
    options = {"attn_implementation": "eager", "dtype": torch.float32}
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole", **options)
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", **options)
    tokens = torch.tensor(np.random.default_rng(0).integers(0, MODEL.vocab_size, (2, 24)))
    with torch.no_grad():
        expected, before = whole(tokens).logits.numpy(), base(tokens).logits.numpy()
        adapted = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "peft", **options)  # finds the base itself
        assert_close(adapted(tokens).logits.numpy(), expected, 5e-5)
        assert_close(adapted.merge_and_unload()(tokens).logits.numpy(), expected, 5e-5)
    assert np.abs(before - expected).max() > 0.1 * np.abs(expected).max()  # the adapters matter
    again = peft.PeftConfig.from_pretrained(tmp_path / "peft")
    assert again.base_model_name_or_path == str(tmp_path / "model")
    for name in ("peft", "whole"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / name)
        generation = transformers.GenerationConfig.from_pretrained(tmp_path / name)
        assert type(tokenizer) is transformers.PreTrainedTokenizerFast
        assert tokenizer.eos_token_id == generation.eos_token_id == generation.pad_token_id == 0
        assert tokenizer.decode(tokenizer("the model")["input_ids"]) == "the model"
    assert whole.config.eos_token_id == whole.generation_config.eos_token_id == 0
