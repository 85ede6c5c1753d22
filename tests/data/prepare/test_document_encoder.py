"""Which documents can be used, what becomes of them, and that a document has one side however it is written."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.prepare_helpers import (
    CHAT,
    QUARTER,
    check_same,
    make_texts,
    read_back,
    write_jsonl,
    write_lines,
    write_megatron,
)
from zaya_jax.data.prepare.manifest import SPLITS
from zaya_jax.data.prepare.preparation import prepare
from zaya_jax.data.prepare.shards import Records
from zaya_jax.data.tokenizer import load_tokenizer
from zaya_jax.errors import InputError


def test_documents_of_megatron_end_once_and_fit_the_vocabulary(tmp_path, tokenizer):
    loaded = load_tokenizer(tokenizer)
    texts = make_texts(6)
    ids = [loaded.encode(text) for text in texts]
    ids[1] += [loaded.eot]
    bad = [[5, loaded.vocab_size, 5], [5, -1], [loaded.eot], [], [5, loaded.eot, 5]]
    documents = [*ids[:3], *bad[:2], *ids[3:], *bad[2:]]
    path = write_megatron(tmp_path / "in", [[tokens] for tokens in documents], "int32")
    with pytest.raises(InputError, match=rf"^5 documents .*\n  {path}:4: invalid tokens: .* below {loaded.vocab_size}"):
        prepare([str(path)], tokenizer, tmp_path / "out", QUARTER, workers=1)
    manifest = prepare([str(path)], tokenizer, tmp_path / "out", QUARTER, workers=1, max_bad=5)
    check_same(texts, read_back(tmp_path / "out"))
    assert manifest.counts == {"invalid tokens": 3, "empty": 1, "end token inside": 1}
    lines = [int(example.removeprefix(f"{path}:").partition(":")[0]) for example in manifest.examples]
    assert lines == [4, 10, 11]
    assert manifest.examples[0].endswith(" (also at 5, 9)")


def test_conversations_are_kept_with_their_roles(tmp_path, tokenizer):
    loaded = load_tokenizer(tokenizer)
    conversations = [[{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"{text}?"},
             {"role": "assistant", "content": text, "reasoning": "ä ☃"}] for text in make_texts(20)]  # fmt: skip
    thinking = {"role": "assistant", "content": "<think>hm</think>yes"}
    forged = [{"role": "user", "content": "a <|endoftext|>"}, {"role": "assistant", "content": "b"}]
    bad = [forged, [thinking], "text", [{"role": "cat", "content": "miaow"}]]
    lines = [*conversations[:5], [conversations[0][0]], *conversations[5:], *bad]
    path = write_lines(tmp_path / "in.jsonl", [{"messages": line} for line in lines])
    with pytest.raises(InputError, match=rf"{path}:6: not a conversation: .* no assistant message"):
        prepare([str(path)], tokenizer, tmp_path / "out", CHAT, workers=1, unit_bytes=600)
    manifest = prepare([str(path)], tokenizer, tmp_path / "out", CHAT, workers=1, unit_bytes=600, max_bad=4)
    assert manifest.kind == "chat"
    assert manifest.counts == {"not a conversation": 3, "special token": 1}
    assert any("'<|endoftext|>', which would end a turn" in example for example in manifest.examples)
    expected, written = [*conversations, [{**thinking, "content": "yes", "reasoning": "hm"}]], {}
    for split in SPLITS:
        entry = manifest.split(split)
        written[split] = [json.loads(record) for record in Records(tmp_path / "out", entry.shards)]
        texts = [
            [text for message in conversation for text in (message.get("reasoning"), message["content"]) if text]
            for conversation in written[split]
        ]
        lengths = np.load(tmp_path / "out" / entry.lengths.file)
        assert lengths.tolist() == [sum(len(loaded.encode(text)) for text in spoken) for spoken in texts]
        assert (entry.documents, entry.tokens) == (len(lengths), lengths.sum())
        assert entry.text_bytes == sum(len(text.encode()) for spoken in texts for text in spoken)
        assert written[split] == [conversation for conversation in expected if conversation in written[split]]
    assert len(written["train"]) + len(written["heldout"]) == len(expected)


def test_conversations_in_the_form_of_sharegpt_are_read_and_what_would_be_lost_is_refused(tmp_path, tokenizer):
    conversation = [{"from": "human", "value": "2 + 3?"}, {"from": "gpt", "value": "5"}]
    others = [{"functions": [{"name": "f"}]}, {"system": ["Be brief."]}, {"tools": "[]", "system": ""}]
    records = [{"conversations": conversation}, *({"conversations": conversation, **siblings} for siblings in others)]
    path = write_lines(tmp_path / "in.jsonl", records)
    with pytest.raises(
        InputError, match=rf"^2 documents .*\n  {path}:2: unread field: 'functions' next to 'conversations' is"
    ):
        prepare([str(path)], tokenizer, tmp_path / "out", CHAT, workers=1)
    manifest = prepare([str(path)], tokenizer, tmp_path / "out", CHAT, workers=1, max_bad=2)
    kept = [
        json.loads(record) for split in SPLITS for record in Records(tmp_path / "out", manifest.split(split).shards)
    ]
    assert kept == [[{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "5"}]] * 2


def test_a_conversation_that_json_cannot_hold_is_refused(tmp_path, tokenizer):
    message = pa.struct([("role", pa.string()), ("content", pa.string()), ("said", pa.timestamp("s"))])
    conversations = [[{"role": "assistant", "content": "yes", "said": extra}] for extra in (None, 0)]
    pq.write_table(pa.table({"messages": pa.array(conversations, pa.list_(message))}), tmp_path / "in.parquet")
    inputs = [str(tmp_path / "in.parquet")]
    with pytest.raises(InputError, match=r"in\.parquet:2: not a conversation: it contains a value that JSON cannot"):
        prepare(inputs, tokenizer, tmp_path / "out", CHAT, workers=1)
    assert prepare(inputs, tokenizer, tmp_path / "out", CHAT, workers=1, max_bad=1).counts == {"not a conversation": 1}


def test_a_document_is_on_one_side_whether_it_is_text_or_token_ids_of_any_type(tmp_path, tokenizer):
    texts = make_texts(40)
    loaded = load_tokenizer(tokenizer)
    ids = [loaded.encode(text) for text in texts]
    inputs = {"text": write_jsonl(tmp_path / "in.jsonl", texts)}
    for dtype in ("int32", "int64", "uint16"):
        inputs[dtype] = write_megatron(tmp_path / dtype, [[tokens] for tokens in ids], dtype)
    inputs["with ends"] = write_megatron(tmp_path / "ends", [[[loaded.eot, *tokens, loaded.eot]] for tokens in ids])
    written = {}
    for name, path in inputs.items():
        prepare([str(path)], tokenizer, tmp_path / "out" / name, QUARTER, workers=1)
        written[name] = read_back(tmp_path / "out" / name)
    assert written["text"]["heldout"]
    assert all(splits == written["text"] for splits in written.values())
