import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.prepare_helpers import write_arrow
from zaya_jax.data.readers.documents import Unit
from zaya_jax.data.readers.inputs import list_units
from zaya_jax.data.readers.tables import count_pieces, read_table
from zaya_jax.errors import InputError

texts = st.one_of(st.none(), st.text(st.characters(exclude_categories=["Cs"])))


def one_unit(path):
    return Unit("arrow", (str(path),), 0, count_pieces(str(path)), path.stat().st_size)


@given(
    batches=st.lists(st.lists(texts, max_size=6), min_size=1, max_size=6),
    stream=st.booleans(),
    compression=st.sampled_from([None, "lz4", "zstd"]),
    unit_bytes=st.integers(1, 3000),
)
def test_units_of_any_size_give_every_row_once_in_order(
    tmp_path_factory, read_all, batches, stream, compression, unit_bytes
):
    path = tmp_path_factory.mktemp("arrow") / "a.arrow"
    write_arrow(path, batches, stream=stream, compression=compression)
    units = list_units([path], unit_bytes=unit_bytes)
    assert sum(unit.bytes for unit in units) == path.stat().st_size
    assert not stream or len(units) == 1
    rows = list(enumerate((text for batch in batches for text in batch), 1))
    good = [(n, text) for n, text in rows if text and not text.isspace()]
    bad = [(n, "empty") for n, text in rows if not text or text.isspace()]
    assert read_all(units) == (good, bad)


def test_a_file_is_cut_by_batches_and_a_stream_is_not(tmp_path):
    batches = [[f"{i}", f"{i}b"] for i in range(6)]
    file, stream = (write_arrow(tmp_path / f"{s}.arrow", batches, stream=s) for s in (False, True))
    assert [(u.start, u.stop) for u in list_units([file], unit_bytes=-(-file.stat().st_size // 3))] == [
        (0, 2),
        (2, 4),
        (4, 6),
    ]
    assert [(u.start, u.stop) for u in list_units([stream], unit_bytes=1)] == [(0, 1)]


@pytest.mark.parametrize("stream", [True, False])
def test_messages_come_as_json_has_them_and_bytes_add_up(tmp_path, stream):
    chats = [[{"role": "user", "content": f"hi {i}"}] for i in range(100)]
    kind = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    path = write_arrow(tmp_path / "a.arrow", [chats[:30], chats[30:]], stream=stream, kind=kind)
    entries = list(read_table(one_unit(path), "text"))
    assert [document.value for document in entries] == chats
    assert sum(document.bytes for document in entries) == pytest.approx(path.stat().st_size, abs=1000)


@pytest.mark.parametrize("stream", [True, False])
def test_texts_that_are_not_utf8_are_bad_alone(tmp_path, stream):
    path = write_arrow(tmp_path / "a.arrow", [["one", "caf_", "three"]], stream=stream)
    path.write_bytes(path.read_bytes().replace(b"caf_", b"caf\xe9"))
    first, bad, last = read_table(one_unit(path), "text")
    assert (first.value, last.value) == ("one", "three")
    assert (bad.line, bad.reason) == (2, "not UTF-8")


@pytest.mark.parametrize("stream", [True, False])
def test_damage_is_told_with_the_name_of_the_file(tmp_path, stream):
    path = write_arrow(tmp_path / "a.arrow", [["one " * 999, "two"], ["three"]], stream=stream)
    unit, data = one_unit(path), path.read_bytes()
    for content in (data[: len(data) // 2], data[:100], b"nonsense and more", b""):
        path.write_bytes(content)
        with pytest.raises(InputError, match=r"The Arrow file .*a\.arrow cannot be read: .+"):
            list(read_table(unit, "text"))


def test_a_stream_cut_anywhere_is_never_read_as_complete(tmp_path):
    data = write_arrow(tmp_path / "a.arrow", [["one"] * 3, ["two"], ["three"]]).read_bytes()
    for cut in range(1, len(data)):
        (tmp_path / "a.arrow").write_bytes(data[:cut])
        with pytest.raises(InputError, match=r"a\.arrow (cannot be read|ends without its end-of-stream marker)"):
            list(read_table(Unit("arrow", (str(tmp_path / "a.arrow"),), 0, 1, cut), "text"))


@pytest.mark.parametrize("stream", [True, False])
def test_offsets_that_point_outside_are_damage(tmp_path, stream):
    path = write_arrow(tmp_path / "a.arrow", [["a" * 1000, "b" * 1001, "c"]], stream=stream)
    data = path.read_bytes()
    offset = (2001).to_bytes(4, "little") + (2002).to_bytes(4, "little")
    assert data.count(offset) == 1
    path.write_bytes(data.replace(offset, (2**30).to_bytes(4, "little") + (2002).to_bytes(4, "little")))
    with pytest.raises(InputError, match=r"The Arrow file .*a\.arrow cannot be read: .+"):
        list(read_table(one_unit(path), "text"))


def test_a_file_with_fewer_batches_than_it_had_is_told(tmp_path):
    path = write_arrow(tmp_path / "a.arrow", [["one"]] * 3, stream=False)
    unit = one_unit(path)
    write_arrow(path, [["one"]], stream=False)
    with pytest.raises(InputError, match="has 1 record batch, fewer than the 3 it had"):
        list(read_table(unit, "text"))
