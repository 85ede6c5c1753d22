import bz2
import gzip
import io
import json
import lzma
import pickle
import random
import re

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from zaya_jax.data.readers import jsonl
from zaya_jax.data.readers.documents import BadDocument, Document, Unit
from zaya_jax.data.readers.inputs import list_units
from zaya_jax.data.readers.jsonl import read_jsonl
from zaya_jax.errors import InputError

BAD_LINES = {
    b"{": "invalid JSON",
    b"nonsense": "invalid JSON",
    b'{"text": "two"} {}': "invalid JSON",
    b'{"text": "a\x00b"}': "invalid JSON",
    b'{"text": ' + b"9" * 5000 + b"}": "invalid JSON",
    b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}": "invalid JSON",
    b'{"text": "caf\xe9"}': "not UTF-8",
    b'{"text": "\\ud800 alone"}': "not UTF-8",
    b'{"text": [{"content": "\\uDFFF"}]}': "not UTF-8",
    b'{"body": "other"}': "no field",
    b'["text"]': "wrong type",
    b'"text"': "wrong type",
    b'{"text": 3}': "wrong type",
    b'{"text": {"text": "deeper"}}': "wrong type",
    b'{"text": ""}': "empty",
    b'{"text": " \\n"}': "empty",
    b'{"text": []}': "empty",
    b'{"text": null}': "empty",
}

values = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(lambda text: not text.isspace()),
    st.sampled_from(["a\r\nb", "a\u2028\x85\x0bb", "\\n", "☃" * 40, "\ufeff", "x\0y", "\U0001f600"]),
    st.lists(st.dictionaries(st.text("ab"), st.text(st.characters(exclude_categories=["Cs"]))), min_size=1),
)
good_lines = st.builds(
    lambda value, ascii_only: (value, json.dumps({"n": 0, "text": value}, ensure_ascii=ascii_only).encode()),
    values,
    st.booleans(),
)
bad_lines = st.sampled_from(sorted(BAD_LINES, key=len)[:-2]).map(lambda line: (None, line))
blank_lines = st.sampled_from([b"", b" ", b"\t"]).map(lambda line: (None, line))
files = st.lists(
    st.tuples(st.one_of(good_lines, good_lines, bad_lines, blank_lines), st.sampled_from([b"\n", b"\r\n"])), max_size=12
)


def expected(lines):
    """What the lines hold: documents as (line, value), bad ones as (line, reason)."""
    documents = [(n, value) for n, ((value, _), _) in enumerate(lines, 1) if value is not None]
    bad = [(n, BAD_LINES[line]) for n, ((_, line), _) in enumerate(lines, 1) if line in BAD_LINES]
    return documents, bad


def one_unit(path, size=1):
    return Unit("jsonl", (str(path),), 0, 1 if path.suffix in set(jsonl.COMPRESSED) else path.stat().st_size, size)


@given(lines=files, unit_bytes=st.one_of(st.integers(1, 8), st.integers(1, 400)), last_newline=st.booleans())
def test_units_of_any_size_give_every_document_once_in_order_and_bad_lines_with_their_numbers(
    tmp_path_factory, read_all, lines, unit_bytes, last_newline
):
    data = b"".join(line + end for (_, line), end in lines)
    data = data if last_newline else data.removesuffix(b"\n")
    path = tmp_path_factory.mktemp("jsonl") / "a.jsonl"
    path.write_bytes(data)
    if data.strip():
        assert read_all(list_units([path], unit_bytes=unit_bytes)) == expected(lines)


@given(lines=files, cut=st.floats(0, 1))
def test_compressed_files_of_several_members_give_the_same(tmp_path_factory, read_all, zstd, lines, cut):
    data = b"".join(line + end for (_, line), end in lines)
    half = int(len(data) * cut)  # most often inside a line
    folder = tmp_path_factory.mktemp("jsonl")
    for name, compress in (("a.jsonl.gz", gzip.compress), ("a.ndjson.zst", zstd)):
        (folder / name).write_bytes(compress(data[:half]) + compress(b"") + compress(data[half:]))
        if not data.strip():
            with pytest.raises(InputError, match=rf"contain no document: .*{re.escape(name)}"):
                list_units([folder / name])
            continue
        [unit] = list_units([folder / name], unit_bytes=1)
        assert (unit.start, unit.stop, unit.bytes) == (0, 1, (folder / name).stat().st_size)
        assert read_all([unit]) == expected(lines)


@pytest.mark.parametrize("line", BAD_LINES, ids=lambda line: line[:20].decode(errors="replace"))
def test_a_bad_line_is_told_with_its_reason_and_the_next_is_read(tmp_path, line):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n" + line + b'\n{"text": "good"}\n')
    bad, good = read_jsonl(one_unit(path), "text")
    assert isinstance(bad, BadDocument)
    assert (bad.file, bad.line, bad.reason) == (str(path), 2, BAD_LINES[line])
    assert bad.detail
    assert (good.value, good.line) == ("good", 3)


def test_other_fields_may_hold_anything(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": NaN, "b": "\\ud800", "text": "\\u0041", "text2": -Infinity}\n')
    [document] = read_jsonl(one_unit(path), "text")
    assert document.value == "A"


def test_a_byte_order_mark_is_taken_off_the_file_alone(tmp_path, zstd):
    data = b'\xef\xbb\xbf{"text": "\xef\xbb\xbfone"}\n\xef\xbb\xbf{"text": "two"}\n'
    for name, compress in (("a.jsonl", bytes), ("a.jsonl.gz", gzip.compress), ("a.jsonl.zst", zstd)):
        (tmp_path / name).write_bytes(compress(data))
        document, bad = read_jsonl(one_unit(tmp_path / name), "text")
        assert document.value == "\ufeffone"
        assert (bad.line, bad.reason) == (2, "invalid JSON")


def test_documents_are_read_without_a_look_at_what_lies_before_the_unit(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    lines = [json.dumps({"text": f"{n} " + "x" * 5000}).encode() + b"\n" for n in range(2000)]
    path.write_bytes(b"".join(lines))
    *_, last = list_units([path], unit_bytes=2**20)
    reads = []

    class Spy(io.FileIO):
        def readinto(self, buffer):
            reads.append((self.tell(), super().readinto(buffer)))
            return reads[-1][1]

    def spying(file, mode, buffering=-1):
        return io.BufferedReader(Spy(file, mode), buffering if buffering > 0 else 8192)

    monkeypatch.setattr(jsonl, "open", spying, raising=False)
    documents = list(read_jsonl(last, "text"))
    assert reads
    assert min(place for place, _ in reads) >= last.start - 1
    reads.clear()
    line = documents[0].line
    assert sum(size for _, size in reads) >= last.start - 1  # so the spy sees what is read
    assert documents[0].value.startswith(f"{line - 1} ")
    reads.clear()
    assert [document.line for document in documents] == list(range(line, 2001))
    assert not reads


def test_a_document_tells_its_line_after_a_pickle(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "one"}\n' * 9)
    *_, last = list_units([path], unit_bytes=16)
    [document] = read_jsonl(last, "text")
    assert isinstance(document, Document)
    assert pickle.loads(pickle.dumps(document)).line == 9  # noqa: S301


def test_bytes_of_documents_add_up_to_the_file(tmp_path, zstd):
    rng = random.Random(0)
    data = b"".join(json.dumps({"text": rng.randbytes(999).hex()}).encode() + b"\n" for _ in range(3000))
    for name, compress in (("a.jsonl", bytes), ("a.jsonl.gz", gzip.compress), ("a.jsonl.zst", zstd)):
        (tmp_path / name).write_bytes(compress(data))
        sizes = [document.bytes for document in read_jsonl(one_unit(tmp_path / name), "text")]
        assert sum(sizes) == pytest.approx((tmp_path / name).stat().st_size, abs=2**12)
        assert max(sizes) < sum(sizes) / 1.5  # and not all at once


DAMAGE = {
    "half": lambda packed: packed[: len(packed) // 2],
    "all but the end": lambda packed: packed[:-3],
    "a second member cut": lambda packed: packed + packed[: len(packed) // 3],
    "something behind it": lambda packed: packed + b"something",
    "not compressed": lambda packed: b"something else",
    "a header alone": lambda packed: packed[:5],
}


PACK = {".gz": gzip.compress, ".zst": zstandard.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


@pytest.mark.parametrize("ending", PACK)
@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_compressed_file_is_named_and_never_ends_in_silence(tmp_path, ending, what):
    rng = random.Random(0)
    data = b"".join(json.dumps({"text": rng.randbytes(50).hex()}).encode() + b"\n" for _ in range(500))
    path = tmp_path / f"a.jsonl{ending}"
    path.write_bytes(DAMAGE[what](PACK[ending](data)))
    with pytest.raises(InputError, match=rf"a\.jsonl{ending} cannot be read: .+\."):
        list(read_jsonl(one_unit(path), "text"))


def test_a_window_of_two_gib_padding_and_frames_without_content_are_read(tmp_path):
    settings = zstandard.ZstdCompressionParameters(window_log=31, enable_ldm=True)
    lines = [json.dumps({"text": str(number)}).encode() + b"\n" for number in range(9)]
    writer = zstandard.ZstdCompressor(compression_params=settings).compressobj()  # of a size that is not known
    skippable = bytes([0x50, 0x2A, 0x4D, 0x18, 3, 0, 0, 0]) + b"abc"
    written = {
        "a.jsonl.zst": skippable + writer.compress(lines[0]) + writer.flush() + zstandard.compress(b"".join(lines[1:])),
        "b.jsonl.gz": gzip.compress(lines[0]) + bytes(9) + gzip.compress(b"".join(lines[1:])) + bytes(5000),
        "c.jsonl.xz": lzma.compress(lines[0]) + bytes(8) + lzma.compress(b"".join(lines[1:])),
    }
    for name, content in written.items():
        (tmp_path / name).write_bytes(content)
        assert [document.value for document in read_jsonl(one_unit(tmp_path / name), "text")] == list("012345678")


@pytest.mark.parametrize("where", [slice(10, 20), slice(-8, -4)], ids=["blocks", "checksum"])
def test_a_gzip_file_changed_inside_is_named(tmp_path, where):
    path = tmp_path / "a.jsonl.gz"
    data = bytearray(gzip.compress(b'{"text": "one"}\n' * 1000))
    data[where] = b"\xff" * len(data[where])
    path.write_bytes(data)
    with pytest.raises(InputError, match=r"a\.jsonl\.gz cannot be read: .+\."):
        list(read_jsonl(one_unit(path), "text"))


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_lines_that_are_too_long_are_bad_documents_and_those_after_them_are_read(tmp_path, monkeypatch, pack):
    monkeypatch.setattr(jsonl.fields, "LONGEST", 100)
    monkeypatch.setattr(jsonl, "_READ_BYTES", 64)  # the rest of a line takes several reads
    path = tmp_path / ("a.jsonl" if pack is bytes else "a.jsonl.gz")
    good = b'{"text": "short"}\n'
    whole_line = b'{"text": "' + b"x" * 88 + b'"}'  # as long as allowed, without its end
    lines = [good, whole_line[:-1] + b"\n", b"[" + b"0," * 1000 + b"\n", good, b'"' + b" " * 101]
    path.write_bytes(pack(b"".join(lines)))
    read = [*read_jsonl(one_unit(path), "text")]
    assert [(entry.line, getattr(entry, "reason", None)) for entry in read] == [
        (1, None), (2, "invalid JSON"), (3, "too large"), (4, None), (5, "too large")]  # fmt: skip
    assert read[2].detail == "the line has more than 100 bytes"


def test_a_file_that_became_shorter_or_is_gone_is_named(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n' * 3)
    *_, last = list_units([path], unit_bytes=14)
    path.write_bytes(b'{"text": "a"}\n' * 2)
    with pytest.raises(InputError, match=r"has 28 bytes, fewer than the 42 it had"):
        list(read_jsonl(last, "text"))
    path.unlink()
    with pytest.raises(InputError, match=r"a\.jsonl cannot be read: No such file"):
        list(read_jsonl(last, "text"))
