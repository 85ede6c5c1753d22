import os
import re
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zaya_jax.data.tokenizer import EOT, EOT_TEXT, load_tokenizer, train_tokenizer
from zaya_jax.errors import InputError

TEXTS = [f"def function_{i}(self, value):\n    return value + {i}\n" for i in range(50)]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, 300)


@settings(max_examples=200, deadline=None)
@given(text=st.text() | st.text(alphabet="def (\r\n\t\ufeff\x00☃é") | st.just(f"a{EOT_TEXT}b"))
def test_round_trip_is_exact(tokenizer, text):
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert EOT not in tokens
    assert all(0 < token < 300 for token in tokens)
    assert list(tokenizer.encode_all([text, text])) == [tokens, tokens]


def test_encode_all_keeps_the_order_over_several_batches(tokenizer):
    texts = [str(i) for i in range(1000)]
    assert [tokenizer.decode(tokens) for tokens in tokenizer.encode_all(texts)] == texts


def test_merges_shorten_the_text(tokenizer):
    assert tokenizer.vocab_size == 300
    assert len(tokenizer.encode(TEXTS[0])) < len(TEXTS[0]) / 2


def test_eot_is_shown(tokenizer):
    assert tokenizer.decode([EOT, *tokenizer.encode("é")]) == f"{EOT_TEXT}é"


def test_saved_and_loaded_is_the_same(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "a.json")
    loaded = load_tokenizer(tmp_path / "a.json", 300)
    loaded.save(tmp_path / "b.json")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    text = TEXTS[3] + EOT_TEXT
    assert loaded.encode(text) == tokenizer.encode(text)


def test_same_file_for_any_number_of_threads(tmp_path):
    code = (
        "import sys; from pathlib import Path; from zaya_jax.data.tokenizer import train_tokenizer;"
        f"train_tokenizer({TEXTS!r}, 280).save(Path(sys.argv[1])); assert 'jax' not in sys.modules"
    )
    files = []
    for threads in ("1", "3"):
        path = tmp_path / threads
        environment = {**os.environ, "RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads}
        subprocess.run([sys.executable, "-W", "error", "-c", code, path], check=True, env=environment)
        files.append(path.read_bytes())
    assert files[0] == files[1]


def test_a_small_corpus_uses_fewer_tokens():
    tokenizer = train_tokenizer(["ab"], 4096)
    assert 257 <= tokenizer.vocab_size <= 258
    assert tokenizer.decode(tokenizer.encode("zebra ☃")) == "zebra ☃"


def test_too_small_a_vocabulary_is_named():
    with pytest.raises(InputError, match=r"model\.vocab_size is 256, but must be at least 257"):
        train_tokenizer(TEXTS, 256)
    assert train_tokenizer(TEXTS, 257).vocab_size == 257


def test_a_model_with_fewer_tokens_is_refused(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "t.json")
    with pytest.raises(
        InputError, match=re.escape(f"{tmp_path / 't.json'} has 300 tokens, more than model.vocab_size")
    ):
        load_tokenizer(tmp_path / "t.json", 299)


@pytest.mark.parametrize("content", [None, "", "{}", '{"model": 1}'])
def test_a_damaged_file_is_named(tmp_path, content):
    path = tmp_path / "t.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InputError, match=re.escape(str(path))):
        load_tokenizer(path, 300)


def test_half_a_surrogate_pair_is_named(tokenizer):
    with pytest.raises(InputError, match="position 2"):
        tokenizer.encode("ab\ud800")
