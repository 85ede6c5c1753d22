"""The chat template of a model's tokenizer, as generation finds and renders it."""

import json
import time
from types import SimpleNamespace

import pytest

from zaya_jax.data.special_tokens import SpecialTokens
from zaya_jax.errors import InputError
from zaya_jax.generate.chat import render_prompt
from zaya_jax.generate.source import _template

NAMED = [
    {"name": "tool_use", "template": "tools"},
    {"name": "default", "template": "{% for message in messages %}{{ message.content }}{% endfor %}"},
]


def template(folder, value):
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}))
    return _template(folder)


def opened(template):
    return SimpleNamespace(template=template, special=SpecialTokens("</s>", "<s>", "</s>"),
                             others={"unk_token": "<unk>"})  # fmt: skip


def written(template):
    return render_prompt(opened(template), [{"role": "user", "content": "hi"}])


def test_of_named_templates_the_default_is_used(tmp_path):
    assert written(template(tmp_path, NAMED)) == "hi"
    assert template(tmp_path, {each["name"]: each["template"] for each in NAMED}) == NAMED[1]["template"]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (NAMED[:1], "has the chat templates tool_use, but none named default"),
        ([{"name": "default"}], "chat_template of .* but must be text, or a list of objects"),
        (7, "chat_template of .* is 7, but must be text"),
    ],
)
def test_a_template_that_is_none_is_refused_and_never_replaced(tmp_path, value, message):
    with pytest.raises(InputError, match=message):
        template(tmp_path, value)


def test_a_template_receives_what_transformers_passes():
    source = (
        "{{ bos_token }}{{ unk_token }}{{ tools is none and documents is none }}{{ messages[0].reasoning_content }}"
    )
    conversation = [{"role": "assistant", "content": "5", "reasoning": "2 + 3"}]
    assert render_prompt(opened(source + "{{ messages[1].content or '' }}"), conversation).startswith(
        "<s><unk>True2 + 3"
    )


def test_a_template_may_write_the_date_where_text_is_generated():
    days = [time.strftime("%d %B %Y")]
    text = written("{{ strftime_now('%d %B %Y') }}" + NAMED[1]["template"])
    assert text.removesuffix("hi") in [*days, time.strftime("%d %B %Y")]  # midnight may pass
