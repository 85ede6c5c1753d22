"""Questions with answers, and system messages beside conversations, are the same from every format."""

import csv
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zaya_jax.data.readers.fields import PAIRS, is_pair, read_record
from zaya_jax.data.readers.inputs import list_units
from zaya_jax.errors import InputError

texts = st.sampled_from(["Add.", "2 + 3", "☃\n\nTwo.", "", " "])
records = st.fixed_dictionaries({"instruction": texts, "output": texts, "input": texts, "system": texts, "id": texts})


def expected(record):
    """The messages of a record of Alpaca's, None if it cannot be used, and the keys that are not read."""
    parts = [record["instruction"], *([record["input"]] if record["input"].strip() else [])]
    if not all(part.strip() for part in [*parts, record["output"]]):
        return None
    said = [{"role": "user", "content": "\n\n".join(parts)}, {"role": "assistant", "content": record["output"]}]
    return [{"role": "system", "content": record["system"]}, *said] if record["system"].strip() else said


@given(rows=st.lists(records, min_size=1, max_size=6))
def test_alpaca_is_the_same_from_every_format(tmp_path_factory, read_all, rows):
    folder = tmp_path_factory.mktemp("alpaca")
    (folder / "a.json").write_text(json.dumps(rows, indent=1))
    (folder / "a.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    pq.write_table(pa.Table.from_pylist(rows), folder / "a.parquet")
    with (folder / "a.csv").open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    messages = list(map(expected, rows))
    for path in folder.iterdir():
        documents, bad = read_all(list_units([path]), "messages")
        assert [value for _, value in documents] == [said for said in messages if said is not None], path
        assert [reason for _, reason in bad] == ["empty"] * messages.count(None)
        if path.suffix != ".csv":  # whose numbers are those of lines
            assert [number for number, _ in documents] == [n for n, said in enumerate(messages, 1) if said is not None]


@pytest.mark.parametrize("question", PAIRS)
@pytest.mark.parametrize("wrong", [3, ["a"], None])
def test_a_pair_has_texts_and_other_keys_are_counted(question, wrong):
    record = {question: "2 + 3?", PAIRS[question]: "5", "id": 7, "tools": []}
    value, bad, unread = read_record(record, question, is_pair=True)
    assert (value[-1], bad, unread) == ({"role": "assistant", "content": "5"}, None, ("id",))
    for key in (question, PAIRS[question]):
        _, (reason, detail), _ = read_record({**record, key: wrong}, question, is_pair=True)
        assert reason == ("empty" if wrong is None else "wrong type")
        assert repr(key) in detail
    assert read_record({**record, "history": [["a", "b"]]}, question, is_pair=True)[1][0] == "unread field"
    assert not is_pair(question, question)  # --field names it: then it is a text
    assert read_record(record, question, is_pair=False)[0] == "2 + 3?"


@pytest.mark.parametrize(("content", "message"), [
    ("[" * 100_000, r"a\.json is not valid JSON: "), ('[{"text": "a"}', r"a\.json is not valid JSON: "),
    ("[" + " " * 100 + "]", r"a\.json is one JSON list of more than 50 bytes\. Convert it, .*: jq -c"),
])  # fmt: skip
def test_a_list_that_cannot_be_read_is_refused(tmp_path, read_all, monkeypatch, content, message):
    (tmp_path / "a.json").write_text(content)
    monkeypatch.setattr("zaya_jax.data.readers.fields.LONGEST", 50 if message.endswith("-c") else 2**27)
    with pytest.raises(InputError, match=message):
        read_all(list_units([tmp_path / "a.json"]))


@pytest.mark.parametrize(("role", "content"), [("role", "content"), ("from", "value")])
def test_a_system_text_beside_a_conversation_is_its_first_message(role, content):
    said = [{role: "user", content: "2 + 3?"}, {role: "assistant", content: "5"}]
    system = {"role": "system", "content": "Be brief."}
    value, bad, unread = read_record({"messages": said, "system": "Be brief."}, "messages", is_pair=False)
    assert (value, bad, unread) == ([system, *said], None, ())
    said.insert(0, {role: "system", content: "Be long."})
    _, bad, _ = read_record({"messages": said, "system": "Be brief."}, "messages", is_pair=False)
    assert bad[0] == "unread field"
    _, bad, _ = read_record({"messages": said[1:], "system": ["Be brief."]}, "messages", is_pair=False)
    assert bad[0] == "unread field"
