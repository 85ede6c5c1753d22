"""A corpus of a few small files, prepared once."""

from pathlib import Path

import pytest

from tests.data.prepare_helpers import make_texts, write_jsonl
from zaya_jax.config import BatchConfig, Config, DataConfig, EvaluationConfig, ModelConfig, PhaseConfig, TrainConfig
from zaya_jax.data.loading.sources import open_sources
from zaya_jax.data.tokenizer import train_tokenizer

CONTEXT = 16


@pytest.fixture(scope="session")
def make_config():
    def make(corpus, cache, *, vocab_size=300, context=CONTEXT, seed=0, steps=40, batch=4, **data):
        model = ModelConfig(
            vocab_size=vocab_size, hidden_size=8, num_layers=1, num_query_heads=2, num_kv_heads=2, head_dim=4,
            num_experts=2, expert_size=8, router_size=4, max_positions=64,
        )  # fmt: skip
        data = {"suffixes": (".txt",), "heldout_fraction": 0.3, **data}
        config = Config(
            model,
            (PhaseConfig(tokens=steps * batch * context),),
            seed=seed,
            data=DataConfig(corpus=str(corpus), cache_dir=str(cache), context=context, **data),
            train=TrainConfig(batch=BatchConfig(tokens=batch * context)),
            evaluation=EvaluationConfig(batch_size=3),
        )
        config.check()
        return config

    return make


@pytest.fixture(scope="session")
def write_corpus():
    def write(root: Path, files: int = 12) -> Path:
        root.mkdir(parents=True, exist_ok=True)
        for i in range(files):
            folder = root / f"part{i % 3}"
            folder.mkdir(exist_ok=True)
            text = f"file {i}: naïve ☃ text\r\n" + f"words and more words, {i * i}.\n" * (i % 5)
            (folder / f"{i}.txt").write_bytes(text.encode())
        return root

    return write


@pytest.fixture(scope="session")
def tiny(tmp_path_factory, make_config, write_corpus):
    """A config and what `open_sources` makes of it."""
    root = tmp_path_factory.mktemp("tiny")
    config = make_config(write_corpus(root / "corpus"), root / "cache", heldout_fraction=0.4)
    return config, open_sources(config)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """The file of a tokenizer of 300 tokens."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_tokenizer(make_texts(100), 300).save(path)
    return path


@pytest.fixture
def texts_file(tmp_path):
    """A JSONL file of 40 texts, about 5 kB."""
    return write_jsonl(tmp_path / "in.jsonl", make_texts(40))
