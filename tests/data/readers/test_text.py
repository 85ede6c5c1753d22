import os
import re

import pytest

from zaya_jax.data.prepare.workers import _MOST_MEMORY
from zaya_jax.data.readers.documents import BadDocument, Document, Unit
from zaya_jax.data.readers.fields import LONGEST
from zaya_jax.data.readers.text import read_text
from zaya_jax.errors import InputError


def unit(*paths):
    return Unit("text", tuple(map(str, paths)), 0, len(paths), 0)


def test_each_file_is_one_document_with_every_byte_kept(tmp_path):
    texts = ["one", "\ufefftwo\r\nlines\r\n\u2028", "  drei ☃\n\n"]
    paths = [tmp_path / f"{i}.txt" for i in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_bytes(text.encode())
    entries = list(read_text(unit(*paths)))
    assert all(isinstance(document, Document) for document in entries)
    assert [(d.value, d.file, d.line, d.bytes) for d in entries] == [
        (text, str(path), 1, len(text.encode())) for text, path in zip(texts, paths, strict=True)
    ]
    assert [d.value for d in read_text(unit(*paths)._replace(start=1, stop=2))] == texts[1:2]


@pytest.mark.parametrize(
    ("data", "reason"), [(b"", "empty"), (b" \r\n", "empty"), (b"caf\xe9", "not UTF-8"), (b"\xed\xa0\x80", "not UTF-8")]
)
def test_a_file_without_text_is_bad_and_the_next_is_read(tmp_path, data, reason):
    (tmp_path / "bad").write_bytes(data)
    (tmp_path / "good").write_bytes(b"good")
    bad, good = read_text(unit(tmp_path / "bad", tmp_path / "good"))
    assert isinstance(bad, BadDocument)
    assert (bad.file, bad.line, bad.reason) == (str(tmp_path / "bad"), 1, reason)
    assert good.value == "good"


def test_a_file_that_is_gone_is_named(tmp_path):
    with pytest.raises(InputError, match=r"gone\.txt cannot be read: No such file"):
        list(read_text(unit(tmp_path / "gone.txt")))


def test_the_parts_into_which_a_large_text_is_to_be_split_fit_in_the_memory_of_a_worker(tmp_path):
    path = tmp_path / "large.txt"
    path.touch()
    os.truncate(path, LONGEST + 1)
    (bad,) = read_text(unit(path))
    assert isinstance(bad, BadDocument)
    part = re.search(r"split -C (\d+)m", bad.detail)
    assert part is not None
    assert int(part[1]) * 2**20 * 190 < _MOST_MEMORY  # bytes per character, see docs/data.md
