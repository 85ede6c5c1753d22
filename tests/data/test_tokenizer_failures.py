"""What the tokenizers library raises, panics of its Rust code too, ends no more than the document that it is about."""

import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.prepare_helpers import CHAT, write_jsonl, write_lines
from zaya_jax.data.prepare.preparation import PrepareSettings, prepare
from zaya_jax.data.tokenizer import load_tokenizer
from zaya_jax.errors import InputError

FATAL = "a" * 60 + "c"  # takes more steps than the library allows
SETTINGS = PrepareSettings(heldout=0)


@pytest.fixture(scope="module")
def panics(tokenizer, tmp_path_factory):
    """A tokenizer whose pattern takes exponential time."""
    tree = json.loads(tokenizer.read_text())
    split = {"type": "Split", "pattern": {"Regex": "(a+)+b"}, "behavior": "Isolated", "invert": False}
    tree["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, tree["pre_tokenizer"]]}
    path = tmp_path_factory.mktemp("panics") / "tokenizer.json"
    path.write_text(json.dumps(tree))
    return path


@pytest.fixture(scope="module")
def lacks(tmp_path_factory):
    """A tokenizer of two words, without a token for others."""
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<|endoftext|>": 0, "good": 1, "word": 2}))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    path = tmp_path_factory.mktemp("lacks") / "tokenizer.json"
    backend.save(str(path))
    return path


@settings(max_examples=2)
@given(st.sets(st.integers(0, 11), min_size=1, max_size=3))
def test_the_documents_on_which_a_tokenizer_panics_are_named_and_skipped(panics, tmp_path_factory, bad):
    folder = tmp_path_factory.mktemp("panic")
    texts = [FATAL if number in bad else f"text {number}" for number in range(12)]
    path = write_jsonl(folder / "in.jsonl", texts)
    first = min(bad) + 1
    with pytest.raises(InputError, match=rf"^{len(bad)} document.*\n  {path}:{first}: tokenizer fails: The tokenizer "
                       r"cannot encode a text: .*retry-limit.*\."):  # fmt: skip
        prepare([str(path)], panics, folder / "out", SETTINGS, workers=1)
    manifest = prepare([str(path)], panics, folder / "out", SETTINGS, workers=1, max_bad=len(bad))
    assert manifest.counts == {"tokenizer fails": len(bad)}
    assert manifest.train.documents == 12 - len(bad)


def test_a_conversation_on_which_a_tokenizer_panics_is_skipped(panics, tmp_path):
    conversations = [
        [{"role": "user", "content": text}, {"role": "assistant", "content": "yes"}] for text in ("good", FATAL)
    ]
    path = write_lines(tmp_path / "in.jsonl", [{"messages": messages} for messages in conversations])
    manifest = prepare([str(path)], panics, tmp_path / "out", CHAT, workers=1, max_bad=1)
    assert manifest.counts == {"tokenizer fails": 1}
    assert manifest.examples[0].startswith(f"{path}:2: tokenizer fails: ")


def test_texts_without_a_token_are_skipped(lacks, tmp_path):
    path = write_jsonl(tmp_path / "in.jsonl", ["good", "bad", "good word", "worse"])
    manifest = prepare([str(path)], lacks, tmp_path / "out", SETTINGS, workers=1, max_bad=2)
    assert manifest.counts == {"tokenizer fails": 2}
    assert manifest.train.documents == 2


@pytest.mark.parametrize("method", ["encode", "encode_template", "encode_rendering"])
def test_other_commands_end_with_a_sentence(panics, method):
    with pytest.raises(InputError, match=r"^The tokenizer cannot encode a .*retry-limit-in-match over\.$"):
        getattr(load_tokenizer(panics), method)(FATAL)
