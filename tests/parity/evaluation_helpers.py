"""A random model with the files of a tokenizer, as lm-eval's own model `hf` reads them."""

import json
import random
from pathlib import Path

import tokenizers

from tests.helpers import random_model, tiny_config
from tests.train_helpers import WORDS
from zaya_jax.data.tokenizer import EOT_TEXT, train_tokenizer
from zaya_jax.hf.exporter import save_pretrained

# As of published models: it ends a turn, and strips the content.
TEMPLATE = """{% for m in messages %}<|{{ m.role }}|> {{ m.content | trim }}<|end|>
{% endfor %}{% if add_generation_prompt %}<|assistant|> {% endif %}"""


def write_model(path: Path, bos: bool) -> Path:
    save_pretrained(random_model(tiny_config(vocab_size=300, max_positions=128)), path)
    draw = random.Random(0)
    train_tokenizer([" ".join(draw.choices(WORDS, k=30)) + "0123456789" for _ in range(50)], 300).save(
        path / "tokenizer.json"
    )
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": bos, "eos_token": EOT_TEXT,
                "bos_token": EOT_TEXT, "pad_token": EOT_TEXT, "clean_up_tokenization_spaces": False}  # fmt: skip
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    (path / "generation_config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}))
    if bos:
        backend = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{EOT_TEXT} $A", special_tokens=[(EOT_TEXT, 0)]
        )
        backend.save(str(path / "tokenizer.json"))
    return path
