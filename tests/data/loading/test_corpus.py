import re
import sysconfig
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zaya_jax.config import DataConfig
from zaya_jax.data.loading.text_corpus import find_corpus
from zaya_jax.data.prepare.manifest import SPLITS
from zaya_jax.errors import InputError


def config(root, **values):
    return DataConfig(**{"corpus": str(root), "suffixes": (".txt",), "heldout_fraction": 0.3, **values})


def write(root: Path, names) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"text of {name}")
    return root


def test_files_are_sorted_and_empty_or_other_ones_left_out(tmp_path):
    names = [f"{letter}/{i}.txt" for letter in "ba" for i in range(10)]
    write(tmp_path, [*names, "a/code.py", "tests/kept.txt"])
    (tmp_path / "a/empty.txt").touch()
    corpus = find_corpus(config(tmp_path))
    assert list(corpus.train) == sorted(corpus.train)
    assert list(corpus.heldout) == sorted(corpus.heldout)
    assert sorted(corpus.train + corpus.heldout) == sorted([*names, "tests/kept.txt"])
    assert list(corpus.texts("heldout")) == [f"text of {name}" for name in corpus.heldout]
    assert corpus.unread == {".py": 1, "empty": 1}


def test_the_split_of_a_file_depends_on_its_content_alone(tmp_path):
    names = [f"{i}.txt" for i in range(40)]
    few = find_corpus(config(write(tmp_path / "few", names[:20])))
    many = find_corpus(config(write(tmp_path / "many", names)))
    assert set(few.heldout) == set(many.heldout) & set(names[:20])
    assert set(find_corpus(config(tmp_path / "many", heldout_fraction=0.2)).heldout) <= set(many.heldout)
    # A fixed expectation: the hash must not change between versions, or held-out text would be trained on.
    assert few.heldout == ("0.txt", "10.txt", "13.txt", "14.txt", "15.txt", "19.txt", "7.txt")
    for i, name in enumerate(names):
        (tmp_path / "many" / f"copy {i} of {name}").write_bytes((tmp_path / "many" / name).read_bytes())
    copied = find_corpus(config(tmp_path / "many"))
    assert set(copied.texts("heldout")) == set(many.texts("heldout"))
    assert not set(copied.texts("heldout")) & set(copied.texts("train"))
    assert len(copied.heldout) == 2 * len(many.heldout)


@given(change=st.sampled_from(["none", "text", "name", "new"]))
def test_digest_follows_content(tmp_path_factory, change):
    root = write(tmp_path_factory.mktemp("corpus"), [f"{i}.txt" for i in range(8)])
    before = find_corpus(config(root)).digest()
    if change == "text":
        (root / "3.txt").write_text("text of 4.txt")
    elif change == "name":
        (root / "3.txt").rename(root / "30.txt")  # keeps its place and its split
    elif change == "new":
        (root / "8.txt").write_text("text")
    assert (find_corpus(config(root)).digest() == before) == (change == "none")


def test_stdlib_has_sources_but_no_tests_and_no_installed_packages():
    corpus = find_corpus(DataConfig())
    files = corpus.train + corpus.heldout
    assert corpus.root == Path(sysconfig.get_path("stdlib"))
    assert {"argparse.py", "json/decoder.py", "unittest/case.py"} <= set(files)
    assert not [file for file in files if re.search(r"(^|/)(tests?|idle_test|site-packages|dist-packages)/", file)]
    corpus.digest()  # reads every file: all are UTF-8
    assert 0.02 < len(corpus.heldout) / len(files) < 0.06


@pytest.mark.parametrize("fraction", [1e-9, 0.04, 1 - 1e-9])
def test_each_split_of_a_small_corpus_has_a_text(tmp_path, fraction):
    write(tmp_path, ["a.txt", "b.txt"])
    assert {len(find_corpus(config(tmp_path, heldout_fraction=fraction)).files(split)) for split in SPLITS} == {1}
    write(tmp_path, [f"{i}.txt" for i in range(20)])
    corpus = find_corpus(config(tmp_path, heldout_fraction=fraction))
    if fraction != 0.04:
        assert len(corpus.heldout if fraction < 0.5 else corpus.train) == 1
    (tmp_path / "copy.txt").write_text((corpus.root / corpus.heldout[0]).read_text())
    assert "copy.txt" in find_corpus(config(tmp_path, heldout_fraction=fraction)).heldout


def test_a_corpus_of_one_text_is_refused(tmp_path):
    write(tmp_path, ["a.txt"])
    with pytest.raises(
        InputError, match=r"data\.corpus is .* contains only one distinct text \(a\.txt; 1 file in .* split this"
    ):
        find_corpus(config(tmp_path))
    (tmp_path / "b.txt").write_text("text of a.txt")
    with pytest.raises(InputError, match=r"one distinct text \(a\.txt; 2 files in"):
        find_corpus(config(tmp_path))


def test_a_folder_or_file_that_cannot_be_used_is_named(tmp_path):
    def refused(root, path, problem):
        with pytest.raises(InputError, match=re.escape(f"{path} {problem}")):
            find_corpus(config(root))

    refused(tmp_path / "absent", tmp_path / "absent", "is not a folder")
    refused(write(tmp_path, ["a.py"]), tmp_path, "contains no non-empty file that ends in .txt")
    write(tmp_path, [f"{i}.txt" for i in range(10)])
    (tmp_path / "4.txt").write_bytes(b"good \xff bad")
    refused(tmp_path, tmp_path / "4.txt", "is not UTF-8: the byte at offset 5")
    (tmp_path / "4.txt").unlink()
    (tmp_path / "4.txt").symlink_to(tmp_path / "absent")
    refused(tmp_path, tmp_path / "4.txt", "cannot be read")


def test_json_lines_are_not_read_as_texts(tmp_path):
    write(tmp_path, ["a.jsonl", "b.json", "c.json"])
    find_corpus(config(tmp_path, suffixes=(".json", ".jsonl")))
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n\n{"text": "two"}\n')
    with pytest.raises(
        InputError, match=r"/a\.jsonl has one JSON object per line, .*data\.suffixes.*text\. Read it with .* prepare"
    ):
        find_corpus(config(tmp_path, suffixes=(".json", ".jsonl")))
    find_corpus(config(tmp_path, suffixes=(".json",)))
