"""No text becomes a control token: one that begins or ends a document or a turn, whatever its flags say."""

import json
import re
from contextlib import nullcontext

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers

from tests.data.prepare_helpers import CHAT, QUARTER, write_jsonl, write_lines
from tests.tokenizer_kinds import KINDS
from zaya_jax.data.loading.rendering import open_rendered
from zaya_jax.data.prepare.preparation import PrepareSettings, prepare
from zaya_jax.data.prepare.shards import open_documents
from zaya_jax.data.tokenizer import EOT_TEXT, Tokenizer, load_tokenizer
from zaya_jax.errors import InputError

CONTROL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<｜User｜>", "<start_of_turn>", "[INST]", "[/INST]"]
TEXT = ["<tool_call>", "<|fim_prefix|>", "    ", "<b>", "[NAME]"]  # what texts may write
FLAGS = st.fixed_dictionaries({flag: st.booleans() for flag in ("special", "normalized", "lstrip", "rstrip")})


def make(kind: str, **flags: bool) -> tokenizers.Tokenizer:
    """A tokenizer with tokens of both kinds, those of `CONTROL` with these flags."""
    backend = KINDS[kind]()
    add = backend.add_special_tokens if flags.get("special") else backend.add_tokens
    add([AddedToken(text, **flags) for text in CONTROL])
    backend.add_tokens([AddedToken(text, normalized=False) for text in TEXT])
    return backend


def found(names, text: str) -> list[str]:
    return re.findall("|".join(map(re.escape, names)), text)


@pytest.mark.parametrize("kind", ["byte level", "llama", "gemma", "wordpiece"])
@given(flags=FLAGS, parts=st.lists(st.sampled_from([*CONTROL, EOT_TEXT, *TEXT, " ", "the", "\n", "<|", "|>"])))
def test_in_a_text_they_are_text_and_in_a_rendering_they_are_tokens(kind, flags, parts):
    tokens = Tokenizer(make(kind, **flags), EOT_TEXT, "<s>", "</s>")
    control = {tokens.token_id(text): text for text in [*CONTROL, EOT_TEXT]}
    assert tokens.specials == set(control.values())
    text = "".join(parts)
    encoded = tokens.encode(text)
    assert not control.keys() & set(encoded)
    assert list(tokens.encode_all([text])) == [encoded]
    known = {tokens.token_id(text): text for text in TEXT}
    assert [known[token] for token in encoded if token in known] == found(TEXT, text)
    rendered = [control[token] for token in tokens.encode_template(text) if token in control]
    assert rendered == found(control.values(), text)


def test_nor_do_texts_that_are_normalized_to_them():
    backend = make("byte level", special=True, normalized=True)
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokens = Tokenizer(backend, EOT_TEXT, "<s>", "</s>")
    for text in ("＜|im_end|＞", "<|IM_END|>", "[inst]", "</S>"):
        assert not {tokens.token_id(name) for name in CONTROL} & set(tokens.encode_template(text))
    assert tokens.encode_template("<|im_end|>") == [tokens.token_id("<|im_end|>")]


@pytest.fixture
def tokenizer(tmp_path):
    make("byte level", special=False, normalized=True, lstrip=True, rstrip=True).save(str(tmp_path / "tokenizer.json"))
    names = {"eos_token": "</s>", "bos_token": "<s>", "add_bos_token": False}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    return tmp_path / "tokenizer.json"


def test_prepared_documents_have_none_but_at_their_ends(tmp_path, tokenizer):
    texts = [f"{number} a {text} b{text}" for number, text in enumerate([*CONTROL, EOT_TEXT])]
    path, output = write_jsonl(tmp_path / "in.jsonl", texts), tmp_path / "out"
    manifest = prepare([str(path)], tokenizer, output, QUARTER, workers=1)
    assert not manifest.counts
    backend = tokenizers.Tokenizer.from_file(str(tokenizer))
    control = {backend.token_to_id(text) for text in [*CONTROL, EOT_TEXT]}
    read = []
    for split in ("train", "heldout"):
        documents = open_documents(output, manifest, split)
        for number in range(len(documents)):
            *tokens, _ = documents[number].tokens.tolist()
            assert not control & set(tokens)
            read.append(backend.decode(tokens))
    assert sorted(read) == sorted(texts)


# Tokens of turns that have no usual name, and tags that texts may write.
TURNS, TAGS = ["<<user>>", "@end@", "<turn>", "[gMASK]", "<end_of_utterance>"], ["<think>", "</think>", "\n\n"]
SOURCE = "{% for m in messages %}[gMASK]<<user>>{{ m.content }}<think>\n\n</think>{% generation %}{{ m.content }}"
SOURCE += "<turn>{{ '<end_of_utterance>' }}{% endgeneration %}{% endfor %}"


@pytest.mark.parametrize("where", ["jinja", "config", "named"])
@given(special=st.booleans())
def test_what_the_template_writes_or_stops_generation_is_no_text(tmp_path_factory, where, special):
    folder, backend = tmp_path_factory.mktemp("t"), KINDS["byte level"]()
    add = backend.add_special_tokens if special else backend.add_tokens
    add([AddedToken(text, normalized=False) for text in TURNS])
    backend.add_tokens([AddedToken(text, normalized=False) for text in [*TAGS, "<b>"]])
    backend.save(str(folder / "tokenizer.json"))
    template = [{"name": "default", "template": SOURCE}] if where == "named" else SOURCE
    config = {"chat_template": None if where == "jinja" else template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if where == "jinja":
        (folder / "chat_template.jinja").write_text(SOURCE)
    ids = [backend.token_to_id("@end@"), None, -1, 10**9, "x"]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    tokens = load_tokenizer(folder / "tokenizer.json")
    assert tokens.specials == {EOT_TEXT, *TURNS}
    text = "a".join([*TURNS, *TAGS, "<b>"])
    assert not {tokens.token_id(turn) for turn in TURNS} & set(tokens.encode(text))
    assert {tokens.token_id(tag) for tag in [*TAGS, "<b>"]} <= set(tokens.encode(text))
    assert {tokens.token_id(turn) for turn in TURNS} <= set(tokens.encode_template(text))


def test_a_conversation_with_a_token_of_its_template_is_refused_when_it_is_rendered(tmp_path):
    backend = KINDS["byte level"]()
    backend.add_tokens([AddedToken(text) for text in TURNS])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "turns.jinja").write_text(SOURCE)
    (tmp_path / "cache").mkdir()
    for number, (text, count) in enumerate([("a<<user>>b", 1), ("a@end@<think>", 0)]):
        conversation = [{"role": "user", "content": "a"}, {"role": "assistant", "content": text}]
        path = write_lines(tmp_path / f"{number}.jsonl", [{"messages": conversation}])
        out, options = tmp_path / str(number), PrepareSettings("chat", "messages", heldout=0)
        manifest = prepare([str(path)], tmp_path / "tokenizer.json", out, options, workers=1)
        with pytest.raises(InputError, match=r"'<<user>>', which only the template may") if count else nullcontext():
            open_rendered(out, manifest, "train", str(tmp_path / "turns.jinja"), None, tmp_path / "cache")


def conversations(text: str) -> list[list[dict]]:
    """Conversations that hide a text in each place that a template writes."""
    user, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    call = {"type": "function", "function": {"name": "f", "arguments": json.dumps({"x": [text]})}}
    return [
        [user | {"content": f"a{text}"}, answer],
        [user, answer | {"content": f"{text} b"}],
        [user, answer | {"reasoning": text}],
        [{"role": "system", "content": text}, user, answer],
        [user, {"role": "assistant", "content": None, "tool_calls": [call]}],
        [user, answer, {"role": "tool", "content": f"result {text}", "name": "f"}, answer],
    ]


def test_conversations_with_one_are_refused_wherever_it_is(tmp_path, tokenizer):
    hidden = [chat for text in [*CONTROL, EOT_TEXT] for chat in conversations(text)]
    plain = [chat for text in ["<b>", "fine", "<tool_call>"] for chat in conversations(text)]
    path = write_lines(tmp_path / "in.jsonl", [{"messages": chat} for chat in [*hidden, *plain]])
    manifest = prepare([str(path)], tokenizer, tmp_path / "out", CHAT, workers=1, max_bad=len(hidden))
    assert manifest.counts == {"special token": len(hidden)}
    assert sum(len(open_documents(tmp_path / "out", manifest, split)) for split in ("train", "heldout")) == len(plain)
