import json
import os
import re
import subprocess
import sys

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors

from tests.data_helpers import small_tokenizer
from zaya_jax.data.chat.template import load_template
from zaya_jax.data.tokenizer import EOT_TEXT, EOT_TEXTS, load_tokenizer, train_tokenizer, vocabulary_warning
from zaya_jax.errors import InputError

TEXTS = [f"def function_{i}(self, value):\n    return value + {i}\n" for i in range(50)]


@pytest.fixture(scope="module", name="tokenizer")
def small():
    return small_tokenizer()  # trained on these texts


@settings(max_examples=200, deadline=None)
@given(text=st.text() | st.text(alphabet="def (\r\n\t\ufeff\x00☃é") | st.just(f"a{EOT_TEXT}b"))
def test_round_trip_is_exact(tokenizer, text):
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert tokenizer.eot not in tokens
    assert all(0 < token < 300 for token in tokens)
    assert list(tokenizer.encode_all([text, text])) == [tokens, tokens]


def test_encode_all_keeps_the_order_over_several_batches(tokenizer):
    texts = [str(i) for i in range(1000)]
    assert [tokenizer.decode(tokens) for tokens in tokenizer.encode_all(texts)] == texts


def test_merges_shorten_the_text_and_the_first_token_ends_it(tokenizer):
    assert tokenizer.vocab_size == 300
    assert len(tokenizer.encode(TEXTS[0])) < len(TEXTS[0]) / 2
    assert (tokenizer.eot, tokenizer.eot_text) == (0, EOT_TEXT)
    assert tokenizer.decode([tokenizer.eot, *tokenizer.encode("é")]) == f"{EOT_TEXT}é"


def test_saved_and_loaded_is_the_same(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "a.json")
    loaded = load_tokenizer(tmp_path / "a.json")
    loaded.save(tmp_path / "b.json")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    text = TEXTS[3] + EOT_TEXT
    assert loaded.encode(text) == tokenizer.encode(text)
    assert (loaded.eot, loaded.eot_text, loaded.specials) == (0, EOT_TEXT, {EOT_TEXT})


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


def test_rows_that_no_token_uses_are_warned_of_with_both_values(tokenizer):
    assert tokenizer.vocab_size == 300
    message = vocabulary_warning(tokenizer, 4096)
    assert "has 300 tokens, but model.vocab_size is 4,096; 3,796 rows" in message
    assert vocabulary_warning(tokenizer, 385)
    for padded in (300, 301, 384):
        assert vocabulary_warning(tokenizer, padded) is None


def test_a_pipe_is_refused_rather_than_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for load in (load_tokenizer, load_template):
        with pytest.raises(InputError, match=r"/pipe cannot be read: it is a folder, a pipe"):
            load(tmp_path / "pipe")
    with pytest.raises(InputError, match=r"cannot be read: File name too long\."):
        load_template("x" * 300)


@pytest.mark.parametrize("content", [None, b"", b"{}", b'{"model": 1}', b"[]", b"null", b"\xff"])
def test_a_damaged_file_is_named(tmp_path, content):
    path = tmp_path / "t.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=rf"^The tokenizer file {re.escape(str(path))} cannot be read: .*\.$"):
        load_tokenizer(path)


def test_half_a_surrogate_pair_is_named(tokenizer):
    with pytest.raises(InputError, match="position 2"):
        tokenizer.encode("ab\ud800")


# --- any tokenizer.json ----------------------------------------------------------------------------------------


def altered(tokenizer, path, alter):
    """Write the tokenizer with what `alter` does to the library's."""
    tokenizer.save(path)
    backend = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    alter(backend)
    backend.save(str(path))
    return path


def renamed(tokenizer, path, *names):
    """Write the tokenizer with the special tokens `names` in place of its own."""
    tokenizer.save(path)
    first = names[0] if names else "<nothing>"
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(json.dumps(EOT_TEXT), json.dumps(first)), encoding="utf-8")
    backend = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    backend.add_special_tokens(list(names[1:]))
    backend.save(str(path))
    return path


@pytest.mark.parametrize("name", EOT_TEXTS)
def test_the_end_of_a_document_is_known_where_there_is_one(tokenizer, tmp_path, name):
    path = renamed(tokenizer, tmp_path / "t.json", name, "<|other|>")
    loaded = load_tokenizer(path)
    assert (loaded.eot_text, loaded.eot) == (name, 0)
    assert loaded.specials == {name, "<|other|>"}
    assert loaded.encode(TEXTS[0]) == tokenizer.encode(TEXTS[0])


@pytest.mark.parametrize("names", [EOT_TEXTS[:2], EOT_TEXTS[2:], EOT_TEXTS])
def test_of_several_ends_one_is_asked_for(tokenizer, tmp_path, names):
    path = renamed(tokenizer, tmp_path / "t.json", *names)
    has = f"The tokenizer file {path} has {' and '.join(names)}; name the token that ends a document as eos_token"
    with pytest.raises(InputError, match=f"^{re.escape(has)}"):
        load_tokenizer(path)
    for name in names:
        loaded = load_tokenizer(path, name)
        assert loaded.eot_text == name
        assert loaded.decode([loaded.eot]) == name
        assert loaded.decode(loaded.encode_template(f"a{name}")) == f"a{name}"
        assert loaded.encode_template(f"a{name}")[-1] == loaded.eot


def test_where_no_end_is_known_one_is_asked_for(tokenizer, tmp_path):
    path = renamed(tokenizer, tmp_path / "t.json", "<|stop|>")
    match = rf"^The tokenizer file {re.escape(str(path))} has none of .*</s>; name the token .* with --eot"
    with pytest.raises(InputError, match=match):
        load_tokenizer(path)
    loaded = load_tokenizer(path, "<|stop|>")
    assert (loaded.eot, loaded.eot_text) == (0, "<|stop|>")
    with pytest.raises(InputError, match=re.escape(f"{path} has no token '<|end|>'")):
        load_tokenizer(path, "<|end|>")


def add_ends(backend):
    backend.add_special_tokens(["<|begin|>", "<|end|>"])
    ids = [(name, backend.token_to_id(name)) for name in ("<|begin|>", "<|end|>")]
    backend.post_processor = processors.TemplateProcessing(single="<|begin|> $A <|end|>", special_tokens=ids)


@pytest.mark.parametrize(
    "alter",
    [add_ends, lambda b: b.enable_truncation(3), lambda b: b.enable_padding(length=500), lambda b: b.enable_padding()],
    ids=["post-processor", "truncation", "padding", "padding of batches"],
)
def test_what_the_file_does_around_a_text_changes_nothing(tokenizer, tmp_path, alter):
    loaded = load_tokenizer(altered(tokenizer, tmp_path / "t.json", alter))
    texts = [TEXTS[0] * 3, "", "a", EOT_TEXT]
    expected = [tokenizer.encode(text) for text in texts]
    assert [loaded.encode(text) for text in texts] == expected
    assert list(loaded.encode_all(texts)) == expected
    assert [loaded.encode_template(text) for text in texts] == [tokenizer.encode_template(text) for text in texts]


@settings(max_examples=100, deadline=None)
@given(parts=st.lists(st.sampled_from([EOT_TEXT, "<|end|>", "<|begin|>", "<|", " ", "value", "|>", "end", "\n", "☃"])))
def test_special_texts_are_text_in_a_document_and_tokens_in_a_template(special, parts):
    text = "".join(parts)
    tokens = special.encode(text)
    assert list(special.encode_all([text])) == [tokens]
    assert special.decode(tokens) == text
    ids = {name: special.encode_template(name) for name in special.specials}
    assert all(len(encoded) == 1 for encoded in ids.values())
    assert not {encoded[0] for encoded in ids.values()} & set(tokens)
    pieces = re.split(f"({'|'.join(map(re.escape, special.specials))})", text)
    expected = [token for piece in pieces for token in ids.get(piece) or special.encode(piece)]
    assert special.encode_template(text) == expected
    assert special.encode(text) == tokens  # a template changes nothing for documents


@pytest.fixture(scope="module")
def special(tokenizer, tmp_path_factory):
    """A tokenizer with three special tokens."""
    path = altered(tokenizer, tmp_path_factory.mktemp("special") / "t.json", add_ends)
    loaded = load_tokenizer(path)
    assert loaded.specials == {EOT_TEXT, "<|begin|>", "<|end|>"}
    return loaded


def test_tokens_that_are_added_count(special, tokenizer):
    assert special.vocab_size == tokenizer.vocab_size + 2
    assert special.decode(range(300, 302)) == "<|begin|><|end|>"
