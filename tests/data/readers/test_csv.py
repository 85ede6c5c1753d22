"""CSV files: every cell that a library writes is read back, and what cannot be read is named."""

import csv
import io
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zaya_jax.data.readers.inputs import list_units
from zaya_jax.errors import InputError

cells = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8) | st.sampled_from(
    ["", " ", 'a "b", c', "a\r\nb", "\n", '"', "☃,", "'", "\ufeff", "x\u2028y"]
)
tables = st.lists(st.tuples(cells, cells), max_size=8)


def written(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return list_units([path])


@given(rows=tables, mark=st.sampled_from(["", "\ufeff"]), end=st.sampled_from(["\n", "\r\n"]))
def test_every_cell_is_a_document_or_bad_at_its_line(tmp_path_factory, read_all, rows, mark, end):
    stream, expected, bad = io.StringIO(newline=""), [], []
    quoting = csv.QUOTE_ALL if end == "\n" else csv.QUOTE_MINIMAL  # a \r at the end of a row is else part of its end
    writer = csv.writer(stream, lineterminator=end, quoting=quoting)
    writer.writerow(["id", "text"])
    for row in rows:
        line = stream.getvalue().count("\n") + 1
        writer.writerow(row)
        if row[1].strip():
            expected.append((line, row[1]))
        else:
            bad.append((line, "empty"))
    units = written(tmp_path_factory.mktemp("csv") / "a.csv", mark + stream.getvalue())
    assert read_all(units) == (expected, bad)
    assert sum(unit.bytes for unit in units) == len((mark + stream.getvalue()).encode())


LINES = [(b"1,one", "one"), (b"2", "invalid CSV"), (b"3,caf\xe9", "not UTF-8"), (b'4,"a" b', "invalid CSV"),
         (b"", None), (b"5,x,y", "invalid CSV"), (b'6,"two"', "two")]  # fmt: skip


@given(order=st.permutations(range(len(LINES))))
def test_a_row_that_cannot_be_read_is_bad_alone(tmp_path_factory, read_all, order):
    lines = [LINES[place] for place in order]
    units = written(
        tmp_path_factory.mktemp("csv") / "a.csv", b"id,text\n" + b"".join(line + b"\n" for line, _ in lines)
    )
    numbered = [(line, said) for line, (_, said) in enumerate(lines, 2) if said]
    good = [(line, said) for line, said in numbered if said in ("one", "two")]
    assert read_all(units) == (good, [each for each in numbered if each not in good])


def test_a_quote_that_is_not_closed_is_bad(tmp_path, read_all):
    units = written(tmp_path / "a.csv", 'text\nfirst\n"second\nthird\n')
    assert read_all(units) == ([(2, "first")], [(3, "invalid CSV")])


@pytest.mark.parametrize(("content", "message"), [
    ("id,body\n1,a\n", r"has no column 'text'; its columns are 'id', 'body'\.$"),
    ("text,text\n1,a\n", r"has several columns 'text'; its columns are 'text', 'text'\.$"),
    ("prompt,completion\n1,a\n", r"has no column 'text'; .*; it has 'prompt', and --chat reads conversations\.$"),
    ("prompt,completion,completion\n1,a,b\n", r"has several columns 'completion'; its columns are [^;]*\.$"),
    ("id;text\n1;a\n", r"is 'id;text', whose cells seem to be separated by ';'\. Write the table with commas between"),
    ('"a" b,c\n', r"The first row of .*a\.csv, which names the columns, cannot be read: "),
])  # fmt: skip
def test_a_table_without_the_column_is_refused(tmp_path, read_all, content, message):
    with pytest.raises(InputError, match=message):
        read_all(written(tmp_path / "a.csv", content), "messages" if "several columns 'c" in message else "text")


def test_commas_at_the_ends_of_rows_are_no_columns(tmp_path, read_all):
    units = written(tmp_path / "a.csv", "prompt,completion,,\n1,a,,\n")
    [(_, messages)], bad = read_all(units, "messages")
    assert ([each["content"] for each in messages], bad) == (["1", "a"], [])


def test_a_table_in_a_folder_is_counted_and_read_as_text_where_a_suffix_says_so(tmp_path, read_all):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    (table := tmp_path / "b.csv").write_text("id,label\n1,2\n")
    unread = Counter()
    assert read_all(list_units([tmp_path], unread=unread)) == ([(1, "a")], [])
    assert unread == {".csv": 1}
    assert read_all(list_units([table], suffixes=(".csv",)))[0] == [(1, "id,label\n1,2\n")]
