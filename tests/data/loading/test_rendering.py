import numpy as np
import pytest

from tests.data_helpers import small_tokenizer, write_source
from zaya_jax.data.chat.template import encode_pieces, load_template
from zaya_jax.data.chat.trimming import trim
from zaya_jax.data.loading import rendering as module
from zaya_jax.data.loading.rendering import open_rendered
from zaya_jax.data.prepare import shard_conversion
from zaya_jax.data.prepare.shards import open_documents
from zaya_jax.errors import InputError


def conversation(number, reasoning=0, turns=1):
    messages = [{"role": "system", "content": "Add."}]
    for turn in range(turns):
        messages += [
            {"role": "user", "content": f"{number} + {turn}?"},
            {"role": "assistant", "content": f"It is {number + turn}.", "reasoning": "and so on " * reasoning},
        ]
    return messages


CONVERSATIONS = [conversation(i, reasoning=i % 5, turns=1 + i % 3) for i in range(20)]


@pytest.fixture
def chat(tmp_path, monkeypatch):
    monkeypatch.setattr(shard_conversion, "_cores", lambda: 1)  # processes take longer to start than this takes
    folder = tmp_path / "chat"
    return folder, write_source(folder, CONVERSATIONS[:15], CONVERSATIONS[15:], kind="chat", shards=3)


def write_out(messages):
    tokenizer = small_tokenizer()
    pieces = load_template(None).render(messages, bos=tokenizer.eot_text, eos=tokenizer.eot_text)
    return encode_pieces(pieces, tokenizer.encode_rendering)


def test_what_assistants_write_is_counted_and_nothing_else(chat, tmp_path):
    tokenizer = small_tokenizer()
    for split, messages in (("train", CONVERSATIONS[:15]), ("heldout", CONVERSATIONS[15:])):
        folder, manifest = open_rendered(*chat, split, None, None, tmp_path / "cache")
        assert manifest.kind == "masked"
        assert manifest.counts == {}
        documents = open_documents(folder, manifest, split)
        assert len(documents) == len(messages)
        for number, wanted in enumerate(messages):
            tokens, counts = documents[number]
            assert not counts[0]  # the runs below begin with what is not said
            edges = np.flatnonzero(np.diff(counts.astype(np.int8))) + 1
            runs = [tokenizer.decode(run.tolist()) for run in np.split(tokens, edges)]
            sentence = "".join(runs[1::2])
            unsaid = "".join(runs[::2])
            for message in wanted:
                text = message["content"]
                assert (text in sentence, text in unsaid) == ((True, False) if message["role"] == "assistant"
                                                          else (False, True))  # fmt: skip
            assert sentence.count("<|im_end|>") == sum(message["role"] == "assistant" for message in wanted)
            assert tokenizer.decode(tokens.tolist()).startswith("<|endoftext|><|im_start|>system\n")
        said_bytes = sum(len(tokenizer.decode(documents[i].tokens[documents[i].loss_mask].tolist()).encode())
                         for i in range(len(messages)))  # fmt: skip
        assert manifest.split(split).text_bytes == said_bytes


@pytest.mark.parametrize("limit", [40, 60, 90])
def test_conversations_are_made_to_fit_and_counted(chat, tmp_path, limit):
    folder, manifest = open_rendered(*chat, "train", None, limit, tmp_path / "cache")
    documents = open_documents(folder, manifest, "train")
    outcomes = []
    for number, messages in enumerate(CONVERSATIONS[:15]):
        spans, outcome = trim(messages, limit, write_out)
        outcomes.append(outcome)
        expected = [token for span in spans or [] for token in span.tokens]
        assert documents[number].tokens.tolist() == expected
        assert len(expected) <= limit
    assert manifest.counts == {outcome: outcomes.count(outcome) for outcome in set(outcomes)}


def test_it_is_done_once_for_each_template_and_limit(chat, tmp_path, monkeypatch):
    (tmp_path / "other.jinja").write_text("{% for m in messages %}{% generation %}{{ m.reasoning }}{{ m.content }}"
                                          "{% endgeneration %}{% endfor %}")  # fmt: skip
    ways = [("train", None, None), ("heldout", None, None), ("train", None, 60),
            ("train", str(tmp_path / "other.jinja"), None)]  # fmt: skip
    first = [open_rendered(*chat, *way, tmp_path / "cache") for way in ways]
    assert len({folder for folder, _ in first}) == len(ways)
    monkeypatch.setattr(module, "Conversion", None)
    assert [open_rendered(*chat, *way, tmp_path / "cache") for way in ways] == first
    left = {path.name for folder, _ in first for path in folder.iterdir()}
    assert not [name for name in left if "partial" in name or name.startswith("unit-")]


def test_conversations_whose_template_leaves_out_earlier_reasoning_are_counted(chat, tmp_path):
    path = tmp_path / "last.jinja"
    path.write_text("{{ pad_token }}{% for m in messages %}{% generation %}{{ m.reasoning if loop.last else '' }}"
                    "{{ m.content }}{% endgeneration %}{% endfor %}")  # fmt: skip
    (chat[0] / "tokenizer_config.json").write_text('{"pad_token": "<pad>"}')
    folder, manifest = open_rendered(*chat, "train", str(path), None, tmp_path / "cache")
    earlier = [any(message.get("reasoning") for message in messages[:-1]) for messages in CONVERSATIONS[:15]]
    assert manifest.counts == {"earlier_removed": sum(earlier)}
    written = small_tokenizer().decode(open_documents(folder, manifest, "train")[0].tokens.tolist())
    assert written.startswith("<pad>Add.")
    (chat[0] / "tokenizer_config.json").write_text('{"pad_token": "<other>"}')
    assert open_rendered(*chat, "train", str(path), None, tmp_path / "cache")[0] != folder


def test_a_template_that_refuses_is_told_with_its_conversation(chat, tmp_path):
    path = tmp_path / "strict.jinja"
    path.write_text("{% generation %}{% endgeneration %}{{ raise_exception('no system here') }}")
    with pytest.raises(
        InputError, match=r"(?s)cannot be used .*train-000000\.arrayrecord:0: template: .*no system here"
    ):
        open_rendered(*chat, "train", str(path), None, tmp_path / "cache")


def test_an_interrupted_call_is_gone_on_with(chat, tmp_path, monkeypatch):
    real, calls = module.RenderWork.__call__, []

    def once(self, unit):
        calls.append(unit.file)
        if len(calls) == 2:
            raise KeyboardInterrupt
        yield from real(self, unit)

    monkeypatch.setattr(module.RenderWork, "__call__", once)
    with pytest.raises(KeyboardInterrupt):
        open_rendered(*chat, "train", None, None, tmp_path / "cache")
    folder, manifest = open_rendered(*chat, "train", None, None, tmp_path / "cache")
    assert len(calls) == len(set(calls)) + 1 == 4  # three shards, one of them begun twice
    other = open_rendered(*chat, "train", None, None, tmp_path / "other")
    assert other[1] == manifest
    for path in other[0].iterdir():
        assert path.read_bytes() == (folder / path.name).read_bytes()
