import datetime

import pyarrow as pa
import pytest

from zaya_jax.data.readers.documents import Document, FirstLine
from zaya_jax.data.readers.fields import sibling_rejection
from zaya_jax.data.readers.tables import check_columns, column_documents
from zaya_jax.errors import InputError


def rows(array, **beside):
    batch = pa.record_batch({"text": array, **beside})
    return list(column_documents(batch, file="f", columns=["text", *beside], size=100, before=5, first=FirstLine(11)))


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int16(), pa.string())]
)
def test_texts_of_every_kind_are_documents_and_nulls_are_bad(kind):
    check_columns("f", pa.schema([("text", kind)]), "text")
    texts = [f"text {i}" for i in range(200)]
    array = pa.array([*texts, None, " ", *texts], pa.string()).cast(kind)
    entries = rows(array)
    assert [d.value for d in entries if isinstance(d, Document)] == [*texts, *texts]
    assert [(b.line, b.reason) for b in entries if not isinstance(b, Document)] == [(216, "empty"), (217, "empty")]
    assert [d.line for d in entries] == list(range(16, 16 + 402))
    assert [d.line for d in rows(array[100:300])] == list(range(16, 216))


def test_lists_of_structs_become_lists_of_dicts():
    chats = [[{"role": "user", "content": "hi"}, {"role": "assistant", "content": None}], [], None]
    kind = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    for each in (kind, pa.large_list(kind.value_type)):
        check_columns("f", pa.schema([("text", each)]), "text")
        good, *bad = rows(pa.array(chats, each))
        assert good.value == chats[0]
        assert [b.reason for b in bad] == ["empty", "empty"]


@pytest.mark.parametrize(("beside", "name"), [
    ({"system_prompt": "Be brief."}, "system_prompt"), ({"system_prompt": ""}, None),
    ({"weight": 0}, "weight"), ({"weight": 1.0}, None), ({"train": False}, "train"), ({"label": "math"}, None),
    ({"label": False}, "label"), ({"label": None}, None), ({"label": 0}, None), ({"weight": 0.5}, "weight"),
    ({"train": "false"}, "train"), ({"train": "False "}, "train"), ({"training": "0"}, "training"),
    ({"weight": "0.5"}, "weight"), ({"weight": "1"}, None), ({"weight": ""}, None), ({"label": "0"}, None),
    ({"loss": 0.0}, None), ({"image": False}, None), ({"mask": False}, None),
    ({"mask": [0, 1]}, "mask"), ({"loss_mask": False}, "loss_mask"),
    ({"chat_template_kwargs": {"xml_tools": [], "custom_instructions": ""}}, None),
    ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"xml_tools": [], "custom_instructions": "Be brief."}}, "chat_template_kwargs"),
])  # fmt: skip
def test_what_would_change_a_conversation_beside_it_makes_it_bad_unless_it_is_empty(beside, name):
    bad = sibling_rejection(beside, "messages")
    assert (bad and bad[0]) == (name and "unread field")
    assert bad is None or bad[1].startswith(f"'{name}' next to 'messages' is ")


def test_tools_beside_a_conversation_are_read_and_what_would_be_lost_makes_it_bad():
    chat = pa.array([[{"role": "user", "content": "hi"}]] * 5)
    tools = pa.array(["[]", None, "", '[{"name": "f"}]', "null"])
    schema = pa.schema([("tools", tools.type), ("text", chat.type), ("system", pa.list_(pa.string()))])
    assert check_columns("f", schema, "text") == ["text", "tools", "system"]
    assert check_columns("f", schema, "tools") == ["tools"]
    entries = rows(chat, tools=tools, system=pa.array([[], ["x"], None, None, []]))
    assert [isinstance(row, Document) for row in entries] == [True, False, True, True, True]
    assert (entries[1].line, entries[1].reason, entries[1].detail.split()[0]) == (17, "unread field", "'system'")
    assert entries[3].value == {"messages": chat[3].as_py(), "tools": '[{"name": "f"}]'}
    assert entries[2].value == chat[2].as_py()


def test_conversations_have_two_names_and_are_noticed_where_text_is_asked_for():
    chat = pa.list_(pa.struct([("from", pa.string()), ("value", pa.string())]))
    schema = pa.schema([("id", pa.int64()), ("conversations", chat)])
    assert check_columns("f", schema, "messages") == ["conversations", "id"]
    with pytest.raises(InputError, match=r"no column 'text'; .*; it has 'conversations', and --chat reads conv"):
        check_columns("f", schema, "text")


def test_a_text_that_is_not_utf8_is_bad_alone():
    data = pa.array([b"one", b"caf\xe9", b"three"], pa.binary())
    first, bad, last = rows(data.view(pa.string()))
    assert (first.value, last.value) == ("one", "three")
    assert (bad.line, bad.reason) == (17, "not UTF-8")


def test_a_value_that_python_cannot_hold_is_bad_alone():
    times = pa.array([0, 2**62], pa.int64()).view(pa.timestamp("s"))
    lists = pa.ListArray.from_arrays(pa.array([0, 1, 2], pa.int32()), times)
    good, bad = rows(lists)
    assert good.value == [datetime.datetime(1970, 1, 1)]
    assert (bad.line, bad.reason) == (17, "wrong type")


def test_a_missing_column_is_told_with_those_there_are():
    schema = pa.schema([("id", pa.int64()), ("body", pa.string())])
    with pytest.raises(InputError, match=r"The file f has no column 'text'; its columns are 'id', 'body'\."):
        check_columns("f", schema, "text")
    assert check_columns("f", schema, "body") == ["body"]
    with pytest.raises(InputError, match=r"The file f has several columns 'a'"):
        check_columns("f", pa.schema([("a", pa.string()), ("a", pa.string())]), "a")


@pytest.mark.parametrize("name", ["output", "input", "system", "weight"])
def test_a_conversation_has_each_column_once(name):
    columns = [("instruction", pa.string()), ("output", pa.string()), ("system", pa.string())]
    schema = pa.schema([*columns, *[(name, pa.string())] * (1 if (name, pa.string()) in columns else 2)])
    with pytest.raises(InputError, match=rf"The file f has several columns '{name}'; its columns are [^;]*\.$"):
        check_columns("f", schema, "messages")
    assert check_columns("f", schema, "instruction") == ["instruction"]


@pytest.mark.parametrize(
    "kind", [pa.int64(), pa.binary(), pa.struct([("a", pa.string())]), pa.map_(pa.string(), pa.string())]
)
def test_a_column_that_can_hold_no_document_is_refused_at_once(kind):
    with pytest.raises(InputError, match=r"The column 'text' of the file f has type .*, but must have text or lists"):
        check_columns("f", pa.schema([("text", kind)]), "text")
