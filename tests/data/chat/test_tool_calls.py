"""Tool calls of either format are read alike, and the loss covers the calls, never the results."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.prepare_helpers import write_lines
from zaya_jax.data.chat.conversation import parse_conversation, parse_tools
from zaya_jax.data.chat.template import Template, load_template
from zaya_jax.data.loading.rendering import open_rendered
from zaya_jax.data.prepare.document_encoder import PrepareSettings
from zaya_jax.data.prepare.preparation import prepare
from zaya_jax.data.prepare.shards import open_documents
from zaya_jax.data.tokenizer import load_tokenizer
from zaya_jax.errors import InputError

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"days": {}, "city": {}}}}]
ARGUMENTS = {"days": 2, "city": "Ávila"}  # their order is kept
CALL = {"type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
OPENAI = [
    {"role": "user", "content": "Rain?"},
    {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", **CALL}]},
    {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    {"role": "assistant", "content": "No."},
]
SHAREGPT = [
    {"from": "human", "value": "Rain?"},
    {"from": "function_call", "value": json.dumps(CALL["function"])},
    {"from": "observation", "value": "sunny"},
    {"from": "gpt", "value": "No."},
]
texts = st.text(st.characters(codec="utf-8"), max_size=4)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | texts, lambda x: st.lists(x) | st.dictionaries(texts, x), max_leaves=5
)


@given(st.dictionaries(texts, values, max_size=3), st.booleans(), st.booleans())
def test_a_call_is_the_same_however_it_is_written(arguments, as_text, nested):
    call = {"name": "f", "arguments": json.dumps(arguments) if as_text else arguments}
    written = [{"function": call, "id": 1} if nested else {**call, "id": 1}]
    [_, message] = parse_conversation([{"role": "user", "content": ""}, {"role": "assistant", "tool_calls": written}])
    expected = [{"type": "function", "id": 1, "function": {"name": "f", "arguments": arguments}}]
    assert message == {"role": "assistant", "tool_calls": expected}
    value = json.dumps([call]) if as_text else call
    [said] = parse_conversation([{"from": "function_call", "value": value}])
    assert said["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": arguments}}]
    assert parse_conversation([said]) == [said]


def test_both_formats_are_the_same_conversation():
    openai, sharegpt = (parse_conversation(messages) for messages in (OPENAI, SHAREGPT))
    for message in openai:
        message.pop("tool_call_id", None)
        for call in message.get("tool_calls", []):
            call.pop("id")
    assert sharegpt == openai


@pytest.mark.parametrize("form", ["openai", "sharegpt"])
def test_the_loss_covers_calls_and_answers_but_no_result(tmp_path, tokenizer, form):
    openai, sharegpt = {"messages": OPENAI, "tools": TOOLS}, {"conversations": SHAREGPT, "tools": json.dumps(TOOLS)}
    rows = [openai if form == "openai" else sharegpt, {"messages": OPENAI[2:]}]
    path = write_lines(tmp_path / "in.jsonl", rows)
    settings = PrepareSettings("chat", "messages", heldout=0)
    manifest = prepare([str(path)], tokenizer, tmp_path / "out", settings, workers=1)
    (tmp_path / "cache").mkdir()
    folder, rendered = open_rendered(tmp_path / "out", manifest, "train", None, None, tmp_path / "cache")
    documents, decode = open_documents(folder, rendered, "train"), load_tokenizer(tokenizer).decode
    whole, trained = (decode(documents[0].tokens[mask].tolist()) for mask in (slice(None), documents[0].loss_mask))
    called = json.dumps(CALL["function"], ensure_ascii=False)
    assert trained == f"<tool_call>\n{called}\n</tool_call><|im_end|>No.<|im_end|>"
    assert f"<tools>\n{json.dumps(TOOLS[0], ensure_ascii=False)}\n</tools>" in whole
    assert "<|im_start|>tool\nsunny<|im_end|>\n" in whole
    assert "<tools>" not in decode(documents[1].tokens.tolist())


def test_the_built_in_template_has_one_system_message_and_separates_calls_from_text():
    system = {"role": "system", "content": "Be brief."}
    calls = {"role": "assistant", "content": "Wait.", "tool_calls": [CALL, CALL]}
    pieces = load_template(None).render([system, OPENAI[0], calls], bos="", eos="", tools=TOOLS)
    text = "".join(piece.text for piece in pieces)
    assert text.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n")
    assert text.count("<|im_start|>system") == 1
    call = f"<tool_call>\n{json.dumps(CALL['function'], ensure_ascii=False)}\n</tool_call>"
    assert text.endswith(f"\nWait.\n{call}\n{call}<|im_end|>\n")


def test_a_template_that_leaves_out_tools_is_refused():
    source = "{% for message in messages %}{% generation %}{{ message.content }}{% endgeneration %}{% endfor %}"
    conversation = parse_conversation(OPENAI[2:])
    assert Template(source, "x").render(conversation, bos="", eos="")
    with pytest.raises(ValueError, match="does not write the tools"):
        Template(source, "x").render(conversation, bos="", eos="", tools=TOOLS)
    whether = "{{ tools is none }}" + source  # as transformers passes it
    assert Template(whether, "x").render(conversation, bos="", eos="")[0].text == "True"


def with_call(call):
    return [OPENAI[0], {"role": "assistant", "tool_calls": call}]


@pytest.mark.parametrize(("messages", "reason"), [
    (with_call({"name": "f"}), "message 2 has tool_calls that are an object, but must be a list"),
    (with_call([CALL, "f"]), "message 2, tool_calls[1] is text, but must be an object"),
    (with_call([{"arguments": {}}]), "message 2, tool_calls[0] has no name"),
    (with_call([{"function": {"name": 3}}]), "message 2, tool_calls[0].function has no name"),
    (with_call([{"function": {"name": "f", "arguments": "{x"}}]),
     "message 2, tool_calls[0].function.arguments is text that is not JSON (Expecting"),
    (with_call([{"name": "f", "arguments": "[1]"}]), "message 2, tool_calls[0].arguments is a list, but must be"),
    (with_call([{"name": "f", "parameters": {}}, {"name": "f", "parameters": {"a": 1}}]),
     "message 2, tool_calls[1] has parameters, which is not read; a call has a name and arguments"),
    (with_call([{"function": {"name": "f", "parameters": {"a": 1}}}]),
     "message 2, tool_calls[0] has parameters, which is not read"),
    (with_call([{"function": {"name": "f"}, "arguments": "{}"}]), "message 2, tool_calls[0] has arguments, which is"),
    ([SHAREGPT[0], {"from": "function_call", "value": {"name": "f", "arguments": {}, "thought": "why"}}],
     "message 2 (function_call), value has thought, which is not read"),
    (with_call([{"name": "f", "arguments": '{"a": "\\ud800"}'}]), "message 2 contains an unpaired surrogate"),
    ([SHAREGPT[0], {"from": "function_call", "value": "weather()"}],
     "message 2 (function_call), value is text that is not JSON"),
    ([SHAREGPT[0], {"from": "function_call"}], "message 2 (function_call), value is null, but must be an object"),
    ([SHAREGPT[0], {"from": "observation", "value": {"t": 1}}], "message 2 has a value that is an object"),
])  # fmt: skip
def test_a_bad_call_is_refused_with_its_key(messages, reason):
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - the message is compared below
        parse_conversation(messages)
    assert str(raised.value).startswith(reason)


@pytest.mark.parametrize(("tools", "reason"), [
    ("[{", "tools is text that is not JSON"),
    ({"name": "f"}, "tools is an object, but must be a list"),
    ([{"name": "f"}, {"type": "function"}], "tools[1] has no name"),
    (["f"], "tools[0] is text, but must be an object"),
    ([{"name": "a <|endoftext|>"}], "it contains the text '<|endoftext|>'"),
    ([{"name": "f", "description": "\ud800"}], "tools contains an unpaired surrogate"),
])  # fmt: skip
def test_bad_tools_are_refused_with_file_row_and_key(tmp_path, tokenizer, tools, reason):
    path = write_lines(tmp_path / "in.jsonl", [{"messages": OPENAI}, {"messages": OPENAI, "tools": tools}])
    with pytest.raises(InputError) as raised:
        prepare([str(path)], tokenizer, tmp_path / "out", PrepareSettings("chat", "messages"), workers=1)
    assert f"{path}:2: " in str(raised.value)
    assert reason in str(raised.value)


def test_absent_tools_are_none():
    for value in (None, "", " ", "[]", "null", []):
        assert parse_tools(value) is None
