import bz2
import gzip
import json
import lzma
import os
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from tests.data.prepare_helpers import write_arrow, write_megatron, write_saved
from zaya_jax.data.readers.documents import Unit
from zaya_jax.data.readers.inputs import list_units
from zaya_jax.errors import InputError

MIB = 2**20


COMPRESS = {".gz": gzip.compress, ".zst": zstandard.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


def touch(path: Path, content: bytes = b'{"text": "a"}\n') -> Path:
    """A file with the content, compressed as its suffix says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(COMPRESS.get(path.suffix, bytes)(content))
    return path


UNREAD = {  # kind → writes an item of this kind at a path, to which it may add a suffix
    "hidden": lambda path: touch(path.with_name(f".{path.name}.jsonl")),
    "linked (folders)": lambda path: path.symlink_to(path.parent.parent),
    "without suffix": lambda path: touch(path.with_suffix(["", ".007", ".a-long-suffix"][ord(path.name) % 3])),
    ".md": lambda path: touch(path.with_suffix(".md")),
    ".idx": lambda path: touch(path.with_suffix(".idx")),
    "empty": lambda path: touch(
        path.with_suffix(SUFFIXES[ord(path.name) % len(SUFFIXES)]), b"\n" * (ord(path.name) % 2)
    ),
}
SUFFIXES = [".jsonl", ".jsonl.gz", ".ndjson.zst", ".json.bz2", ".jsonl.xz"]


def sparse(path: Path, size: int) -> Path:
    with path.open("wb") as file:
        file.truncate(size)
    return path


def names(units, root):
    return [str(Path(file).relative_to(root)) for unit in units for file in unit.files]


def test_a_folder_is_walked_in_order_and_what_is_hidden_or_unknown_is_left_out(tmp_path):
    expected = ["a.jsonl", "b/1.jsonl.gz", "b/2.ndjson.zst", "b/c/x.txt", "b.ndjson", "d.txt"]
    for name in [*reversed(expected), ".hidden.jsonl", ".git/a.txt", "README.md", "b/.a.txt", "_SUCCESS"]:
        touch(tmp_path / name)
    write_megatron(tmp_path / "e", [[[1]]])
    (tmp_path / "link").symlink_to(tmp_path / "b")
    (tmp_path / "z.txt").symlink_to(tmp_path / "README.md")
    assert names(list_units([tmp_path]), tmp_path) == [*expected, "e.bin", "z.txt"]
    assert names(list_units([tmp_path], suffixes=()), tmp_path) == [
        name for name in [*expected, "e.bin"] if not name.endswith(".txt")
    ]


def test_jsonl_is_cut_at_multiples_of_the_unit(tmp_path):
    path = touch(tmp_path / "a.jsonl", b"x" * 25)
    assert list_units([path], unit_bytes=10) == [
        Unit("jsonl", (str(path),), start, stop, stop - start) for start, stop in ((0, 10), (10, 20), (20, 25))
    ]


def test_texts_fill_units_and_what_lies_between_ends_one(tmp_path):
    for name, size in (
        ("a.txt", 4),
        ("b.txt", 6),
        ("c.txt", 1),
        ("d.txt", 99),
        ("e.txt", 0),
        ("g.txt", 1),
        ("h.txt", 1),
    ):
        touch(tmp_path / name, b"x" * size)
    touch(tmp_path / "f.jsonl", b"x" * 3)
    units = list_units([tmp_path], unit_bytes=10)
    assert [names([unit], tmp_path) for unit in units] == [
        ["a.txt", "b.txt"], ["c.txt"], ["d.txt"], ["e.txt"], ["f.jsonl"], ["g.txt", "h.txt"]
    ]  # fmt: skip
    assert [(unit.start, unit.stop, unit.bytes) for unit in units] == [
        (0, 2, 10), (0, 1, 1), (0, 1, 99), (0, 1, 0), (0, 3, 3), (0, 2, 2)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("sizes", "largest"), [([20 * MIB], 2 * MIB), ([3 * 2**32, 2**32], 2**34 // 512), ([2**41], 2**30)]
)
def test_a_unit_is_a_512th_of_all_input_within_limits(tmp_path, sizes, largest):
    files = [sparse(tmp_path / f"{i}.jsonl", size) for i, size in enumerate(sizes)]
    units = list_units(files)
    assert max(unit.bytes for unit in units) == largest
    assert sum(unit.bytes for unit in units) == sum(sizes)


def test_row_groups_are_shared_out_evenly(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": [f"{i}" for i in range(10)]}), path, row_group_size=1)
    size = path.stat().st_size
    assert [(u.start, u.stop) for u in list_units([path], unit_bytes=size // 4 + 1)] == [
        (0, 2),
        (2, 5),
        (5, 7),
        (7, 10),
    ]
    assert len(list_units([path], unit_bytes=1)) == 10
    assert len(list_units([path])) == 1


def test_megatron_is_found_by_either_file_or_by_what_both_begin_with(tmp_path):
    path = write_megatron(tmp_path / "v1.2_document", [[[1]]])
    for inputs in (path, tmp_path / "v1.2_document.idx", tmp_path / "v1.2_document"):
        assert list_units([inputs]) == [Unit("megatron", (str(path),), 0, 1, 2)]
    for inputs in (path, tmp_path / "v1.2_document"):
        with pytest.raises(InputError, match="is given twice"):
            list_units([inputs, tmp_path / "v1.2_document.idx"])
    (tmp_path / "v1.2_document.idx").unlink()
    for inputs in (path, tmp_path):
        with pytest.raises(InputError, match=r"needs .*v1\.2_document\.idx next to it, which is missing"):
            list_units([inputs])


def test_a_saved_dataset_is_taken_as_its_state_says_wherever_it_is(tmp_path, read_all):
    for split in ("test", "train"):
        folder = write_saved(tmp_path / "d" / split, [[[f"{split} 1"], [f"{split} 2"]], [[f"{split} 3"]]])
        write_arrow(folder / "cache-0.arrow", [["cached"]])
    (tmp_path / "d" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    touch(tmp_path / "d" / "README.txt")
    write_saved(tmp_path / "d" / "added", [[["by hand"]]])
    for inputs, splits in (("d", ["train", "test"]), (".", ["train", "test"]), ("d/test", ["test"])):
        documents, bad = read_all(list_units([tmp_path / inputs], unread=(unread := Counter())))
        assert [text for _, text in documents] == [f"{split} {i}" for split in splits for i in (1, 2, 3)]
        assert not bad
        assert unread == {"unlisted .arrow": 1 if inputs == "d/test" else 3}
    (tmp_path / "d/train/data-00001-of-00002.arrow").unlink()
    with pytest.raises(InputError, match=r"data-00001-of-00002\.arrow cannot be read: No such file"):
        list_units([tmp_path])


def test_a_saved_dataset_that_selects_rows_is_refused(tmp_path):
    folder = write_saved(tmp_path / "d", [[["kept"], ["deselected"]]])
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps(state | {"_indices_data_files": [{"filename": "indices.arrow"}]}))
    with pytest.raises(InputError, match=rf"{folder} selects its rows through _indices_data_files, .*flatten_indices"):
        list_units([tmp_path])
    (folder / "state.json").write_text(json.dumps(state | {"_indices_data_files": []}))
    assert len(list_units([tmp_path])) == 1


@given(st.dictionaries(st.sampled_from([*"abcdefgh"]), st.sampled_from(list(UNREAD)), min_size=1))
def test_what_a_folder_has_beside_its_documents_is_counted(tmp_path_factory, items):
    folder, unread = tmp_path_factory.mktemp("folder"), Counter()
    touch(folder / "good.jsonl")
    for name in "ab":  # whose .idx is no orphan, while other files of this name are not read
        write_megatron(folder / f"{name}0", [[[1]]])
    for name, kind in items.items():
        UNREAD[kind](folder / name)
    touch(folder / "a0")
    assert names(list_units([folder], unread=unread), folder) == ["a0.bin", "b0.bin", "good.jsonl"]
    assert unread == Counter([*items.values(), "without suffix"])


def test_a_table_without_a_byte_is_damage_even_in_a_folder(tmp_path):
    touch(tmp_path / "a.jsonl")
    touch(tmp_path / "empty.jsonl", b"")
    assert names(list_units([tmp_path]), tmp_path) == ["a.jsonl"]
    touch(tmp_path / "b.parquet", b"")
    with pytest.raises(InputError, match=r"b\.parquet cannot be read"):
        list_units([tmp_path])


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (["gone.jsonl"], r"gone\.jsonl does not exist"),
        (["gone.xyz"], r"gone\.xyz does not exist"),
        (["a.jsonl/b"], "Not a directory"),
        (["x" * 300], "File name too long"),
        (
            ["code.xyz"],
            r"code\.xyz has an unknown suffix; .* \.jsonl, .*\.json\.gz, .*\.parquet, .*\.txt.* pass --suffixes",
        ),
        (["empty.jsonl"], r"empty\.jsonl is empty"),
        (["empty.txt"], r"empty\.txt is empty"),
        (["none"], r"none contains no non-empty file .* known"),
        (["hollow"], r"hollow contains no non-empty file"),
        (["broken"], r"away\.jsonl cannot be read: No such file"),
        (["pipe.jsonl"], r"pipe\.jsonl is neither a file nor a folder"),
        (["a.jsonl", "./none/../a.jsonl"], r"a\.jsonl is given twice"),
        (["a.jsonl", "folder", "folder/b.jsonl"], r"b\.jsonl is given twice"),
        (["linked"], r"linked/b\.jsonl is given twice, also as .*linked/a\.jsonl;"),
        (["rows.parquet"], r"contain no document: .*rows\.parquet"),
        ([], "must be a list of at least one"),
        (["text.json"], r"text\.json has no JSON object in its first line, but must have one per line, or one list"),
    ],
)
def test_what_cannot_be_used_is_named(tmp_path, inputs, message):
    for name in ("a.jsonl", "code.xyz", "none/code.xyz", "folder/b.jsonl", "linked/a.jsonl"):
        touch(tmp_path / name)
    (tmp_path / "linked/b.jsonl").symlink_to("a.jsonl")
    for name in ("empty.jsonl", "empty.txt", "hollow/empty.jsonl"):
        touch(tmp_path / name, b"")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/away.jsonl").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe.jsonl")
    touch(tmp_path / "text.json", b'"a text"\n')
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "rows.parquet")
    with pytest.raises(InputError, match=message):
        list_units([f"{tmp_path}/{name}" for name in inputs])


def test_what_permissions_forbid_is_named(tmp_path, monkeypatch):
    path = touch(tmp_path / "a.jsonl")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may read anything
    with pytest.raises(InputError, match=r"a\.jsonl cannot be read: its permissions forbid it"):
        list_units([path])


def test_one_path_in_place_of_a_list_and_units_of_nothing_are_refused(tmp_path):
    path = touch(tmp_path / "a.jsonl")
    with pytest.raises(InputError, match="must be a list"):
        list_units(str(path))
    with pytest.raises(InputError, match="unit_bytes is 0, but must be at least 1"):
        list_units([path], unit_bytes=0)


def test_json_lines_have_the_names_of_public_data_sets_and_are_never_one_text_silently(tmp_path, capsys):
    compressed = ["c4-train.00000-of-01024.json.gz", "dolma/cc-0000.json.zst", "RC_2005-12.zst", "RS_2011-01.bz2",
                  "RC_2018-02-03.zst", "RS_v2_2006-03.xz", "AskHistorians_comments.zst"]  # fmt: skip
    for name in (*compressed, "00.jsonl.zst", "notes.zst", "dataset_infos.json"):
        touch(tmp_path / name)
    assert sorted(names(list_units([tmp_path]), tmp_path)) == sorted([*compressed, "00.jsonl.zst"])
    assert (
        "data: 2 items of the input not read: 1 .json, 1 .zst. .json files are read if they are named. For other text "
        "files pass --suffixes.\n"
    ) in capsys.readouterr().err
    (tmp_path / "notes.zst").unlink()
    list_units([tmp_path])
    assert capsys.readouterr().err.endswith("1 .json. .json files are read if they are named.\n")
    lines = touch(tmp_path / "lines.json", b'{"text": "a"}\n{"text": "b"}\n')
    assert [unit.format for unit in list_units([lines])] == ["jsonl"]
    with pytest.raises(InputError, match=r"lines\.json has one JSON object per line, .* Name it \.jsonl"):
        list_units([lines], suffixes=(".json",))
    one = touch(tmp_path / "package.json", b'{"name": "a"}\n')
    assert [unit.format for unit in list_units([one], suffixes=(".json",))] == ["text"]
    assert capsys.readouterr().err == "data: 1 .json file read as plain text, one document each.\n"


@pytest.mark.parametrize(("content", "kind"), [
    (b'{"text": "' + b"a" * 2**21 + b'"}\n', "jsonl"),
    (b" \n" * 200 + b'{"text": "a"}\n', "jsonl"),
    (b'\xef\xbb\xbf{"text": "a"}', "jsonl"),
    (b'[{"text": "' + b"a" * 2**21 + b'"}]', "jsonl"),
    (b'\xef\xbb\xbf\n [\n{"text": "a"}]', "jsonl"),
    (b"[" * 100_000, "jsonl"),
    (b"\n", None),
])  # fmt: skip
def test_the_first_line_of_a_json_file_decides_however_long_and_wherever_it_is(tmp_path, content, kind):
    path = touch(tmp_path / "a.json", content)
    if kind:
        assert {unit.format for unit in list_units([path])} == {kind}
    else:
        with pytest.raises(InputError, match=r"a\.json has no JSON object in its first line"):
            list_units([path])
