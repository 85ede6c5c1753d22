import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zaya_jax.data.readers import tables
from zaya_jax.data.readers.documents import Unit
from zaya_jax.data.readers.inputs import list_units
from zaya_jax.data.readers.tables import count_pieces, read_table
from zaya_jax.errors import InputError


def write(path, texts, rows=4, kind=None, **options):
    table = pa.table({"id": range(len(texts)), "text": pa.array(texts, kind or pa.string())})
    pq.write_table(table, path, row_group_size=rows, **options)
    return path


def one_unit(path):
    return Unit("parquet", (str(path),), 0, count_pieces(str(path)), path.stat().st_size)


@given(
    texts=st.lists(st.one_of(st.none(), st.text(st.characters(exclude_categories=["Cs"]))), min_size=1, max_size=30),
    rows=st.integers(1, 9),
    unit_bytes=st.integers(1, 3000),
    compression=st.sampled_from(["zstd", "snappy", "none"]),
)
def test_units_of_any_size_give_every_row_once_in_order(
    tmp_path_factory, read_all, texts, rows, unit_bytes, compression
):
    path = write(tmp_path_factory.mktemp("parquet") / "a.parquet", texts, rows, compression=compression)
    units = list_units([path], unit_bytes=unit_bytes)
    assert sum(unit.bytes for unit in units) == path.stat().st_size
    good = [(n, text) for n, text in enumerate(texts, 1) if text and not text.isspace()]
    bad = [(n, "empty") for n, text in enumerate(texts, 1) if not text or text.isspace()]
    assert read_all(units) == (good, bad)


def test_messages_come_as_json_has_them_and_bytes_add_up(tmp_path):
    chats = [[{"role": "user", "content": f"hi {i}"}] for i in range(1000)]
    path = write(
        tmp_path / "a.parquet", chats, 700, pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    )
    entries = list(read_table(one_unit(path), "text"))
    assert [document.value for document in entries] == chats
    assert sum(document.bytes for document in entries) == path.stat().st_size


CHAT = pa.struct([("content", pa.string()), ("n", pa.int64()), ("images", pa.list_(pa.binary()))])


@pytest.mark.parametrize("kind", [pa.list_(CHAT), pa.large_list(CHAT), pa.list_(CHAT, 2), pa.list_view(CHAT),
                                  pa.list_(pa.map_(pa.string(), pa.string()))])  # fmt: skip
@pytest.mark.parametrize("rows", [20, 300])
@pytest.mark.parametrize("store_schema", [False, True])
def test_values_that_stand_for_much_are_read_as_others(tmp_path, monkeypatch, kind, rows, store_schema):
    monkeypatch.setattr(tables, "_BATCH_BYTES", 1)
    monkeypatch.setattr(tables, "_COMPACT_BYTES", 100_000)  # of some groups, and of some of their rows
    message = {"content": "x" * 2000, "n": 1, "images": [b"y" * 50, None]}
    maps = [[("content", "x" * 2000)], [("a", "b"), ("c", None)]]
    chats = [maps if pa.types.is_map(kind.value_type) else [message | {"n": n}, {**message, "content": str(n % 7)}]
             for n in range(300)]  # fmt: skip
    path = write(tmp_path / "a.parquet", chats, rows, kind, store_schema=store_schema)
    assert [document.value for document in read_table(one_unit(path), "text")] == chats


def test_damage_is_told_with_the_name_of_the_file(tmp_path):
    path = write(tmp_path / "a.parquet", ["one " * 9999, "two"], compression="none", use_dictionary=False)
    data = path.read_bytes()
    unit = one_unit(path)
    for content in (data[: len(data) // 2], b"nonsense", b"", b"PAR1" + bytes(20_000) + data[20_004:]):
        path.write_bytes(content)
        with pytest.raises(InputError, match=r"The Parquet file .*a\.parquet cannot be read: .+"):
            list(read_table(unit, "text"))


def test_a_page_with_a_wrong_checksum_is_damage(tmp_path):
    path = tmp_path / "a.parquet"
    write(path, ["one " * 9999], compression="none", use_dictionary=False, write_page_checksum=True)
    unit, data = one_unit(path), path.read_bytes()
    path.write_bytes(data[:9000] + b"two " + data[9004:])
    with pytest.raises(InputError, match="checksum"):
        list(read_table(unit, "text"))


def test_a_file_with_fewer_row_groups_than_it_had_is_told(tmp_path):
    path = write(tmp_path / "a.parquet", ["one"] * 12)
    unit = one_unit(path)
    write(path, ["one"] * 4)
    with pytest.raises(InputError, match="has 1 row group, fewer than the 3 it had"):
        list(read_table(unit, "text"))
