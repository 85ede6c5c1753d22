import json
import os

import pytest

from tests.data.prepare_helpers import write_arrow, write_saved
from zaya_jax.data.readers.inputs import saved_files
from zaya_jax.errors import InputError


def test_files_come_in_the_order_of_the_state_and_caches_are_left_out(tmp_path):
    folder = write_saved(tmp_path / "saved", [[["a"]], [["b"]], [["c"]]])
    write_arrow(folder / "cache-0123.arrow", [["cached"]])
    names = [f"data-0000{i}-of-00003.arrow" for i in (2, 0, 1)]
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    assert saved_files(folder) == [folder / name for name in names]


@pytest.mark.parametrize("split", ["train", "test", None])
def test_fewer_rows_than_the_dataset_says_are_reported(tmp_path, capsys, split):
    folder = write_saved(tmp_path / "saved", [[["a", "b"], ["c"]], [["d"]]])
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps({**state, "_split": split}))
    for wanted in (4, 5):
        info = {"splits": {"train": {"num_examples": wanted}}}
        (folder / "dataset_info.json").write_text(json.dumps(info))
        assert len(saved_files(folder)) == 2
        err = capsys.readouterr().err
        assert ("has 4 rows, but dataset_info.json says that split 'train' has 5" in err) == (
            split == "train" and wanted == 5
        )
    data = (folder / "data-00000-of-00002.arrow").read_bytes()
    (folder / "data-00000-of-00002.arrow").write_bytes(data[:-8])
    if split == "train":
        with pytest.raises(InputError, match=r"data-00000-of-00002\.arrow ends without its end-of-stream marker"):
            saved_files(folder)


def test_other_folders_are_none(tmp_path):
    (tmp_path / "state.json").write_text("{}")
    assert saved_files(tmp_path) is None


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("state.json", "{", r"state\.json is not JSON"),
        ("state.json", "[" * 100_000, r"state\.json is not JSON"),
        ("state.json", "[]", r"state\.json is not a JSON object"),
        ("state.json", "{}", r"state\.json .* must be an object with a list '_data_files'"),
        ("dataset_info.json", "[]", r"dataset_info\.json is not a JSON object"),
        ("state.json", '{"_data_files": ["a.arrow"]}', r"state\.json .* must list file names"),
        ("state.json", '{"_data_files": [{"filename": 3}]}', r"must list file names, but lists \[3\]"),
        ("dataset_dict.json", '{"splits": "train"}', r"dataset_dict\.json .* with a list 'splits'"),
        ("dataset_dict.json", '{"splits": ["train"]}', r"train/state\.json cannot be read: No such file"),
    ],
)
def test_what_cannot_be_understood_is_named(tmp_path, name, content, message):
    write_saved(tmp_path, [[["a"]]])
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=message):
        saved_files(tmp_path)


@pytest.mark.parametrize("split", ["pipe", "sparse"])
def test_a_pipe_or_a_file_without_end_stops_nothing(tmp_path, split):
    write_saved(tmp_path / "pipe", [[["a"]]])
    write_saved(tmp_path / "sparse", [[["a"]]])
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": [split]}))
    (tmp_path / "pipe" / "state.json").unlink()
    os.mkfifo(tmp_path / "pipe" / "state.json")
    os.truncate(tmp_path / "sparse" / "state.json", 2**40)
    with pytest.raises(InputError, match=rf"{split}/state\.json .*(not a regular file|limit of)"):
        saved_files(tmp_path)
