"""Keys of conversations that are not read are counted by name, and those that change what is trained are refused."""

import json
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.prepare_helpers import CHAT, write_lines
from zaya_jax.data.chat.conversation import parse_conversation, unread_keys
from zaya_jax.data.prepare.preparation import open_manifest, prepare, summary
from zaya_jax.data.readers.documents import FirstLine
from zaya_jax.data.readers.fields import sibling_rejection
from zaya_jax.data.readers.fields import unread_keys as unread_fields
from zaya_jax.data.readers.tables import _value, column_documents

SAID = [{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "5"}]
# As public data sets have them.
RECORDS = [
    {"messages": SAID, "id": "a-1", "source": "web", "category": "sums", "score": 0.5, "timestamp": 1700000000},
    {"messages": SAID, "id": 0, "label": 0, "loss": 1.25, "tools": "[]", "system": "", "num_turns": 1},
    {"messages": SAID, "conversations": [{"from": "human", "value": "other"}], "chosen": SAID, "rejected": SAID},
    {
        "conversations": [
            {"from": "human", "value": "hi", "name": "me"},
            {"from": "gpt", "value": "ho", "end_turn": True},
        ]
    },
    {
        "messages": [
            {**SAID[0], "name": "me", "reasoning": ["why"]},
            {**SAID[1], "finish_reason": "stop", "logprobs": None},
        ]
    },
]


def test_records_of_public_data_are_kept_and_what_is_not_read_is_counted(tmp_path, tokenizer):
    path = write_lines(tmp_path / "in.jsonl", RECORDS)
    manifest = prepare([str(path)], tokenizer, tmp_path / "out", CHAT, workers=1)
    assert manifest.counts == {}
    assert manifest.unread_keys == {
        "id": 2, "source": 1, "category": 1, "score": 1, "timestamp": 1, "label": 1, "loss": 1, "num_turns": 1,
        "conversations": 1, "chosen": 1, "rejected": 1, "messages[].name": 2, "messages[].reasoning": 1,
        "messages[].end_turn": 1, "messages[].finish_reason": 1,
    }  # fmt: skip
    assert open_manifest(tmp_path / "out") == manifest
    assert "  keys not read: 'id' (2), 'messages[].name' (2), " in summary(tmp_path / "out", manifest)


def test_a_table_gives_the_same_counts_as_lines(tmp_path, tokenizer):
    rows = [{"messages": SAID, "id": str(number), "tags": ["x"] if number % 3 else None} for number in range(30)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "in.parquet")
    write_lines(tmp_path / "in.jsonl", rows)
    for name in ("in.parquet", "in.jsonl"):
        manifest = prepare([str(tmp_path / name)], tokenizer, tmp_path / name.replace(".", "-"), CHAT, workers=1)
        assert manifest.unread_keys == {"id": 30, "tags": 20}


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.binary(2), pa.binary_view()])
def test_bytes_beside_a_conversation_are_counted_and_not_copied(kind):
    pictures = pa.array([b"ab", None, b"\xff\xfe"], kind)
    batch = pa.record_batch([pa.array([SAID] * 3), pictures], ["messages", "picture"])
    [*entries] = column_documents(batch, file="x", columns=batch.schema.names, size=3, before=0, first=FirstLine())
    assert [entry.unread for entry in entries] == [("picture",), (), ("picture",)]
    assert _value(pictures[0]) is True


READ, FLAGS = ("role", "content", "tool_call_id"), ("weight", "loss_mask")
names = st.sampled_from(["id", "name", "source", "weight", "reasoning", "images", "loss_mask", "channel", "x", *READ])
values = st.sampled_from([None, "", [], {}, 0, 1, "text", [1], {"a": 1}, False])


@given(st.dictionaries(names, values, max_size=4))
def test_every_key_of_a_message_is_read_counted_or_refused(keys):
    message = {**SAID[0], **{key: value for key, value in keys.items() if key not in READ}}
    try:
        parsed = parse_conversation([message, SAID[1]])
    except ValueError as error:
        assert any(key in str(error) for key in keys)  # noqa: PT017 - most are not refused
        return
    left = {key for key, value in message.items() if value not in (None, "", [], {}) and key not in (*READ, *FLAGS)}
    assert Counter(unread_keys(parsed)) == Counter(f"messages[].{key}" for key in left)


@given(st.dictionaries(st.sampled_from(["id", "system", "functions", "images", "label", "train", "mask", "x"]), values))
def test_every_key_beside_a_conversation_is_read_counted_or_refused(beside):
    bad, counted = sibling_rejection(beside, "messages"), unread_fields(beside, "messages")
    given = {key for key, value in beside.items() if value not in (None, "", [], {})}
    assert bad or set(counted) == given - {"train", "system"}
    assert bad or isinstance(beside.get("system") or "", str)
    assert bad is None or any(f"{key!r} next to" in bad[1] for key in given)


@pytest.mark.parametrize("key", ["function_call", "images", "mask", "reasoning_details", "channel", "train_detail"])
def test_a_key_that_changes_what_is_trained_is_named_with_what_to_do(tmp_path, tokenizer, key):
    said = json.loads(json.dumps(SAID))
    said[1][key] = {"name": "f"}
    with pytest.raises(
        ValueError, match=f"message 2 has a {key}, which is not read; (remove it|write it as tool_calls)"
    ):
        parse_conversation(said)
