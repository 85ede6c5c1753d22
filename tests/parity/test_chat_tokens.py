"""Conversations that are prepared and written out have the tokens that transformers' `apply_chat_template` gives."""

import itertools
import json

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.data.chat.test_tool_calls import OPENAI, TOOLS
from zaya_jax.data.chat.conversation import parse_conversation
from zaya_jax.data.chat.template import DEFAULT_TEMPLATE, Template, encode_pieces, load_template
from zaya_jax.data.loading.rendering import open_rendered
from zaya_jax.data.prepare.preparation import PrepareSettings, prepare
from zaya_jax.data.prepare.shards import open_documents
from zaya_jax.data.special_tokens import other_tokens

pytestmark = pytest.mark.parity
transformers = pytest.importorskip("transformers")

# Gemma 3's, and what the assistant writes marked in it.
GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set first_user_prefix = messages[0]['content'] + '

' -%}
    {%- else -%}
        {%- set first_user_prefix = messages[0]['content'][0]['text'] + '

' -%}
    {%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- if (message['role'] == 'assistant') -%}
        {%- set role = "model" -%}
    {%- else -%}
        {%- set role = message['role'] -%}
    {%- endif -%}
    {{ '<start_of_turn>' + role + '
' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'image' -%}
                {{ '<start_of_image>' }}
            {%- elif item['type'] == 'text' -%}
                {{ item['text'] | trim }}
            {%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception("Invalid content type") }}
    {%- endif -%}
    {{ '<end_of_turn>
' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<start_of_turn>model
'}}
{%- endif -%}
"""
GEMMA_MARKED = GEMMA.replace(
    "        {{ message['content'] | trim }}\n",
    "        {%- if role == 'model' -%}{%- generation -%}{{ message['content'] | trim }}{%- endgeneration -%}\n"
    "        {%- else -%}{{ message['content'] | trim }}{%- endif -%}\n",
)
# OpenAI's, in the words of most models that have it.
CHATML = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_MARKED = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n'}}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}"
    "{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
)
TEXTS = [
    "What is 2 + 3?",
    "It is 5.\n",
    "\n\nand  more,\tplease ☃ naïve 𝛼",
    " ",
    "def f(x):\n    return x",
    "<eos",
    "I  am",
]


def bytes_backend(specials):
    """As GPT-2 and Qwen have it: bytes, and words with the space before them."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets="<bos>" in specials)  # GPT-2 has it, Qwen has not
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(TEXTS * 3, trainer)
    return backend


def gemma_backend(specials):
    """As Gemma has it: spaces written out, bytes for what is unknown, merges over anything, bos by post-processing."""
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    backend = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))  # noqa: S106
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=[*specials, "<unk>", *fallback], show_progress=False)
    backend.train_from_iterator([f"model\n{text}\nuser\n{text}" for text in TEXTS[:-3]] * 3, trainer)
    bos = specials[0]
    backend.post_processor = processors.TemplateProcessing(f"{bos} $A", special_tokens=[(bos, 0)])
    return backend


FORMS = {
    "gemma": (gemma_backend, ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"], GEMMA, GEMMA_MARKED,
              {"bos_token": "<bos>", "eos_token": "<eos>", "add_bos_token": True}),
    "gemma without bos": (gemma_backend, ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"], GEMMA, GEMMA_MARKED,
                          {"bos_token": None, "eos_token": "<eos>"}),
    "gemma in bytes": (bytes_backend, ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"], GEMMA, GEMMA_MARKED,
                       {"bos_token": {"content": "<bos>", "__type": "AddedToken"}, "eos_token": "<end_of_turn>"}),
    "chatml": (bytes_backend, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], CHATML, CHATML_MARKED,
               {"bos_token": None, "eos_token": "<|im_end|>", "add_bos_token": False}),
    "chatml, built in": (bytes_backend, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], CHATML, None,
                         {"bos_token": None, "eos_token": "<|im_end|>", "add_bos_token": False}),
    "chatml over merges": (gemma_backend, ["<bos>", "<eos>", "<|im_start|>", "<|im_end|>"],
                           "{{ bos_token }}" + CHATML + "{{ eos_token }}",
                           "{{ bos_token }}" + CHATML_MARKED + "{{ eos_token }}",
                           {"bos_token": "<bos>", "eos_token": "<eos>", "add_bos_token": False}),
}  # fmt: skip


def conversations():
    """Of one to three turns, with a system message or without."""
    for i in range(3 * len(TEXTS)):
        asked = [{"role": "system", "content": TEXTS[i % len(TEXTS)]}] if i % 3 == 0 else []
        for turn in range(1 + i % 3):
            question, answer = TEXTS[(i + turn) % len(TEXTS)], TEXTS[(2 * i + turn + 1) % len(TEXTS)]
            asked += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        yield asked


@pytest.mark.parametrize("name", FORMS)
def test_prepared_conversations_have_the_tokens_of_transformers(tmp_path, name):
    backend, specials, template, marked, config = FORMS[name]
    backend(specials).save(str(tmp_path / "tokenizer.json"))
    tree = {**config, "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tree))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    said = list(conversations())
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"messages": one}) + "\n" for one in said))
    if marked is not None:
        (tmp_path / "marked.jinja").write_text(marked)
    manifest = prepare([str(tmp_path / "in.jsonl")], tmp_path / "tokenizer.json", tmp_path / "out",
                       PrepareSettings("chat", "messages", heldout=0), workers=1)  # fmt: skip
    path = str(tmp_path / "marked.jinja") if marked is not None else None
    (tmp_path / "cache").mkdir()
    folder, rendered = open_rendered(tmp_path / "out", manifest, "train", path, None, tmp_path / "cache")
    documents = open_documents(folder, rendered, "train")
    assert len(documents) == len(said)
    for number, one in enumerate(said):
        ours = documents[number]
        assert ours.tokens.tolist() == theirs.apply_chat_template(one, tokenize=True, return_dict=False), one
        if marked is not None:
            mask = theirs.apply_chat_template(one, chat_template=marked, return_assistant_tokens_mask=True,
                                              return_dict=True)["assistant_masks"]  # fmt: skip
            np.testing.assert_array_equal(ours.loss_mask, mask)


def test_tools_and_calls_are_written_and_masked_as_by_transformers():
    backend, specials, *_, config = FORMS["chatml"]
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=backend(specials), bos_token=None,
                                                  eos_token=config["eos_token"])  # fmt: skip
    pieces = load_template(None).render(parse_conversation(OPENAI), bos=None, eos=config["eos_token"], tools=TOOLS)
    said = theirs.apply_chat_template(parse_conversation(OPENAI), tools=TOOLS, chat_template=DEFAULT_TEMPLATE,
                                      return_assistant_tokens_mask=True, return_dict=True)  # fmt: skip
    text = "".join(piece.text for piece in pieces)
    assert said["input_ids"] == theirs(text, add_special_tokens=False)["input_ids"]
    spans = encode_pieces(pieces, lambda text: rendering(theirs, text))
    assert said["assistant_masks"] == [int(span.generated) for span in spans for _ in span.tokens]


def rendering(tokenizer, text):
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return encoded["input_ids"], encoded["offset_mapping"]


# How Qwen3 and most models after it write reasoning, which they find in the content or in its own key.
THINKING = """{{ bos_token }}{{ unk_token }}{{ pad_token }}{{ sep_token is defined }}{{ documents is none }}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{%- set content = message.content %}{%- set reasoning = '' %}
{%- if message.reasoning_content is string %}{%- set reasoning = message.reasoning_content %}
{%- elif '</think>' in content %}
{%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}<|im_start|>assistant
{% generation %}
{%- if loop.last or reasoning %}{{ '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}{% endif %}
{{- content.lstrip('\\n') }}<|im_end|>{% endgeneration %}
{%- else %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{%- endif %}
{% endfor %}"""


@pytest.mark.parametrize("template", [THINKING, CHATML_MARKED])
@pytest.mark.parametrize("key", [None, "reasoning", "reasoning_content", "thinking"])
def test_reasoning_is_written_as_transformers_writes_it(tmp_path, template, key):
    backend, specials, *_, config = FORMS["chatml"]
    backend([*specials, "<unk>"]).save(str(tmp_path / "tokenizer.json"))
    tree = {**config, "tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "pad_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tree))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours, others = Template(template, "x"), other_tokens(tmp_path)
    blanks, said = ["", " ", "\n", "\n\n", " \n"], 0
    for before, after in itertools.product(blanks, blanks):
        for reasoning in ("why", "  why\n", "", "\n\n"):
            content = f"{after}  It is 5.\n"
            given = f"{before}{reasoning}" if reasoning.strip() else ""  # white space alone is no reasoning
            if key is None:
                content = f"{before}<think>{before}{reasoning}{after}</think>{content}"
            answer = {"role": "assistant", "content": content, **({key: given} if key else {})}
            asked = [{"role": "user", "content": "<think>"}, answer]
            try:
                pieces = ours.render(parse_conversation(asked), bos=None, eos=config["eos_token"], others=others)
            except ValueError as error:  # of a template that writes no reasoning, and of that which it does not write
                assert "does not write the reasoning of message 2" in str(error)  # noqa: PT017
                assert template == CHATML_MARKED
                assert reasoning.strip()
                continue
            assert "".join(piece.text for piece in pieces) == theirs.apply_chat_template(
                asked, chat_template=template, tokenize=False)  # fmt: skip
            said += 1
    assert said == (len(blanks) ** 2 * (2 if template == CHATML_MARKED else 4))
