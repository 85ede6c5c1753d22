"""Conversations of any format are parsed to one form or refused with the reason, and their special tokens found."""

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.chat_helpers import assistant, reasonings, texts, user
from zaya_jax.data.chat.conversation import find_special, parse_conversation


@settings(max_examples=40)
@given(texts.filter(lambda text: "</think>" not in text), texts, st.sampled_from(["", " ", "\n\n"]))
def test_reasoning_in_the_content_is_split_off_and_an_empty_one_stays(reasoning, answer, space):
    content = f"{space}<think>{space}{reasoning}{space}</think>{space}{answer}{space}"
    [inside] = parse_conversation([assistant(content)])
    if reasoning.strip():
        within, after = f"{space}{reasoning}{space}".strip("\n"), f"{space}{answer}{space}".lstrip("\n")
        assert inside == assistant(after, reasoning=within)
    else:
        assert inside == assistant(content)


@settings(max_examples=40)
@given(reasonings, texts, st.sampled_from(["reasoning", "reasoning_content"]))
def test_reasoning_under_either_name_stays_and_leaves_the_content_alone(reasoning, content, name):
    messages = [user(name="me"), assistant(content, **{name: reasoning})]
    before = copy.deepcopy(messages)
    parsed = parse_conversation(messages)
    assert parsed == [user(name="me"), assistant(content, reasoning=reasoning)] == parse_conversation(parsed)
    assert messages == before


def test_forms_of_a_message():
    calls = [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    parsed = parse_conversation(
        [
            {"role": "user", "content": parts, "id": 7},
            {"role": "assistant", "content": None, "tool_calls": calls, "reasoning": " ", "reasoning_content": None},
            {"role": "assistant", "tool_calls": calls, "reasoning": "r", "reasoning_content": "r"},
            {"role": "user", "content": "<think>not mine"},
            {"role": "user", "content": "", "reasoning_content": "kept"},
            {"role": "assistant", "content": "no <think> at the beginning", "reasoning_content": ""},
        ]
    )
    assert parsed == [
        {"role": "user", "content": "ab", "id": 7},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "assistant", "tool_calls": calls, "reasoning": "r"},
        {"role": "user", "content": "<think>not mine"},
        {"role": "user", "content": "", "reasoning_content": "kept"},
        {"role": "assistant", "content": "no <think> at the beginning"},
    ]


def test_sharegpt_form_is_read():
    said = [
        ("system", "Be brief."),
        ("human", "2 + 3?"),
        ("gpt", "<think>count</think>5"),
        ("human", "so"),
        ("gpt", "6"),
    ]
    parsed = parse_conversation([{"from": speaker, "value": value, "weight": 1} for speaker, value in said])
    roles = ["system", "user", "assistant", "user", "assistant"]
    assert [message["role"] for message in parsed] == roles
    assert [message["content"] for message in parsed] == ["Be brief.", "2 + 3?", "5", "so", "6"]
    assert parsed[2] == {"role": "assistant", "content": "5", "reasoning": "count"}


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"messages": []}, "a conversation must be a list of at least one message"),
        ([], "a conversation must be a list of at least one message"),
        ([user()], "the conversation has no assistant message"),
        ([user(), "hello"], "message 2 is not an object with a role and a content"),
        ([assistant(), {"role": "bot", "content": ""}],
         "message 2 has the role 'bot', which is not one of system, developer, user, assistant, tool"),
        ([{"content": ""}], "message 1 has no role"),
        ([{"from": "bing", "value": ""}], "message 1 is from 'bing', which is not one of system, human, gpt"),
        ([{"from": "gpt"}], "message 1 has a value that is null, but must be text"),
        ([{"role": ["user"], "content": ""}], "message 1 has no role"),
        ([{"role": "user"}], "message 1 has a content that is neither a string nor a list of text parts"),
        ([user(None, tool_calls=[1])], "message 1 has a tool_calls, which is not read; remove it"),
        ([assistant(None)], "message 1 has a content that is neither"),
        ([user([{"type": "image", "text": "a"}])], "message 1 has a content part that is not text"),
        ([user([{"type": "text"}])], "message 1 has a content part that is not text"),
        ([assistant(reasoning=1)], "message 1 has a reasoning that is not a string"),
        ([assistant(reasoning="a", reasoning_content="b")],
         "message 1 has a reasoning and a reasoning_content that differ"),
        ([assistant(thinking="a", reasoning="b")], "message 1 has a reasoning and a thinking that differ"),
        ([assistant(weight=0.5)], "message 1 has the weight 0.5, but must have 0 or 1"),
        ([assistant(weight=1, train=False)], "message 1 has weight and train that differ"),
        ([user(train=True), assistant()], "message 1 has the train True, but only what the assistant writes"),
        ([user(), assistant(weight=0)], "no assistant message of the conversation is trained"),
        ([assistant(train_detail=[{}])], "message 1 has a train_detail, which is not read; remove it"),
        ([user(function_call={"name": "f"}), assistant()], "message 1 has a function_call, which is not read; write"),
        ([user(), assistant(trainable=False)], "no assistant message of the conversation is trained"),
        ([user(), assistant(channel="analysis")], "message 2 has a channel, which is not read; remove it"),
        ([assistant(), assistant(" <think>and on")], "message 2 has a <think> without </think>"),
        ([assistant("\ud800")], "message 1 contains an unpaired surrogate"),
        ([assistant(), user(x=[{"\udfff": 1}])], "message 2 contains an unpaired surrogate"),
    ],
)  # fmt: skip
def test_what_is_no_conversation_is_refused_with_the_reason(value, reason):
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - the message is compared below
        parse_conversation(value)
    assert str(raised.value).startswith(reason)
    assert not str(raised.value).endswith(".")
    str(raised.value).encode()


SPECIALS = frozenset(["<|im_end|>", "<|im_end|>!", "<s>", "a.b"])


@given(st.sampled_from(sorted(SPECIALS)), st.text("<|sx", max_size=5), st.integers(0, 4))
def test_a_special_token_is_found_in_any_string(special, around, place):
    text = f"{around}{special}{around}"
    where = ["content", "reasoning", "argument", "key", "extra"]
    at = {name: text if number == place else "" for number, name in enumerate(where)}
    conversation = [
        user(at["content"]),
        assistant(reasoning=at["reasoning"], tool_calls=[{"arguments": {"x": ["", at["argument"]]}}]),
        user(**{at["key"]: 1}, extra=at["extra"]),
    ]
    assert find_special(conversation, SPECIALS) == ("<s>" if "<s>" in around else special)
    assert find_special(conversation, frozenset()) is None


def test_an_innocent_conversation_has_no_special_token_and_the_first_one_is_told():
    assert find_special([user("<|im_end |> acb"), assistant(x=[1, None, True, "s"])], SPECIALS) is None
    assert find_special([user("a.b <s>"), assistant("<|im_end|>")], SPECIALS) == "a.b"
    assert find_special([user("<|im_end|>!")], SPECIALS) == "<|im_end|>!"
