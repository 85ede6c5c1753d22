import dataclasses
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import astuple
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.data.convert_helpers import SIZE, Count, Deadly, Numbers, Work
from tests.data.prepare_helpers import ROOT, write_jsonl
from zaya_jax.data.prepare.document_encoder import PrepareSettings
from zaya_jax.data.prepare.manifest import describe_file
from zaya_jax.data.prepare.shard_conversion import Conversion, read_note, remove_notes
from zaya_jax.data.prepare.shards import Records
from zaya_jax.data.readers.documents import Unit
from zaya_jax.data.special_tokens import SpecialTokens
from zaya_jax.errors import InputError, RunStopped


@pytest.fixture
def work(tmp_path):
    return Work(tmp_path / "log")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def make_units(count=5, **events):
    """Units of ten numbers from 1 on; `unit3="kill"` says what happens in the fourth."""
    return [Numbers(1 + 10 * i, 11 + 10 * i, events.get(f"unit{i}", "")) for i in range(count)]


def run(folder, units, work, *, numbers=None, workers=1, limit=0):
    Conversion(folder, units, [SIZE] * len(units), "Fix them.", numbers, workers, limit).convert(work, "working")


def started(work):
    """How often each unit was begun."""
    return Counter(int(line.split()[0]) for line in work.log.read_text().splitlines())


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def names_of(number, *splits):
    """The files that a unit leaves."""
    unit = f"{number:06d}"
    shards = [(f"{split}-{unit}.arrayrecord", f"unit-{unit}-{split}.npy") for split in splits or ("train", "heldout")]
    return {f"unit-{unit}.json", *(name for names in shards for name in names)}


def test_a_unit_leaves_shards_and_a_note_that_counts_them(folder, work):
    run(folder, make_units(2), work)
    assert set(contents(folder)) == names_of(0) | names_of(1)
    note = read_note(folder, 1)
    train = [11, 12, 13, 14, 15, 16, 17, 18, 19]
    assert {split: np.load(folder / entry.file).tolist() for split, entry in note.lengths.items()} == {
        "train": train,
        "heldout": [20],
    }
    for entry in (*note.lengths.values(), *note.shards.values()):
        assert (entry.file, entry.bytes, entry.digest) == astuple(describe_file(folder / entry.file))
    assert note.text_bytes == {"train": 2 * sum(train), "heldout": 40}
    assert note.outcomes == {"odd": 5}
    assert note.skipped == {}
    assert [*Records(folder, (note.shards["train"],))] == [str(number).encode() for number in train]
    assert [shard.documents for shard in note.shards.values()] == [9, 1]


def test_a_split_without_documents_has_no_shard(folder, work):
    run(folder, [Numbers(1, 9)], work)
    assert set(contents(folder)) == names_of(0, "train")
    note = read_note(folder, 0)
    assert set(note.shards) == set(note.lengths) == {"train"}


def test_only_the_numbers_asked_for_are_done_and_none_twice(folder, work):
    units = make_units(5)
    run(folder, units, work, numbers=range(1, 5, 2))
    assert started(work) == {11: 1, 31: 1}
    before = contents(folder)
    run(folder, units, work)
    assert started(work) == {1: 1, 11: 1, 21: 1, 31: 1, 41: 1}
    assert {name: contents(folder)[name] for name in before} == before


def test_processes_leave_what_one_alone_leaves(folder, work, tmp_path, capfd):
    (tmp_path / "other").mkdir()
    units = make_units(5)
    run(folder, units, work, workers=2)
    log = work.log.read_text().split()
    assert str(os.getpid()) not in log
    run(tmp_path / "other", units, work)
    assert contents(folder) == contents(tmp_path / "other")
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 2
    for line in lines:  # every byte of the units, whoever did them
        assert re.fullmatch(r"data: working: done, 1\.0 MB in \d+\.\d s \(\d+\.\d MB/s\)", line)


@pytest.mark.parametrize("damage", ["missing", "shorter", "longer", "no lengths", "note cut", "note of something else"])
def test_a_unit_whose_files_do_not_fit_its_note_is_done_again(folder, work, damage):
    run(folder, make_units(2), work)
    before = contents(folder)
    shard, note = folder / "heldout-000001.arrayrecord", folder / "unit-000001.json"
    if damage == "missing":
        shard.unlink()
    elif damage == "shorter":
        os.truncate(shard, shard.stat().st_size - 1)
    elif damage == "no lengths":
        (folder / "unit-000001-train.npy").unlink()
    elif damage == "longer":
        with shard.open("ab") as file:
            file.write(b"x")
    else:
        note.write_text(note.read_text()[:-20] if damage == "note cut" else "[1]")
    assert read_note(folder, 0) is not None
    assert read_note(folder, 1) is None
    run(folder, make_units(2), work)
    assert started(work) == {1: 1, 11: 2}
    assert contents(folder) == before


@pytest.mark.parametrize(("event", "error"), [("raise", InputError), ("crash", ZeroDivisionError)])
def test_an_exception_in_the_work_leaves_no_part_of_its_unit(folder, work, event, error):
    units = make_units(3, unit1=event)
    with pytest.raises(error):
        run(folder, units, work)
    assert set(contents(folder)) == names_of(0)


def test_an_exception_in_a_process_is_raised_here_and_leaves_no_partial_file(folder, work):
    with pytest.raises(InputError, match=r"^The unit of 11 is bad\.$"):
        run(folder, make_units(4, unit1="raise"), work, workers=2)
    names = set(contents(folder))
    assert not [name for name in names if "partial" in name or "000001" in name]
    before = {name: (folder / name).stat().st_mtime_ns for name in names}
    time.sleep(0.1)
    assert {name: (folder / name).stat().st_mtime_ns for name in contents(folder)} == before  # nobody is still at work


def test_a_process_that_is_killed_is_replaced_and_its_unit_done_again(folder, work, tmp_path):
    units = make_units(5, unit2="kill")
    run(folder, units, work, workers=2)
    assert started(work) == {1: 1, 11: 1, 21: 2, 31: 1, 41: 1}
    remove_notes(folder)
    (tmp_path / "other").mkdir()
    run(tmp_path / "other", units, work)
    remove_notes(tmp_path / "other")
    assert contents(folder) == contents(tmp_path / "other")


def test_only_a_document_that_ends_processes_is_left_out_and_named():
    check_deadly({6})


@pytest.mark.soak
@given(st.sets(st.integers(1, 20), min_size=1, max_size=4))
@example({6, 7, 20})  # an abort, no memory, an exit
@settings(max_examples=5)
def test_only_the_documents_that_end_processes_are_left_out_and_named(deadly):
    check_deadly(deadly)


def check_deadly(deadly):
    with tempfile.TemporaryDirectory() as name:
        base, units = Path(name), make_units(2)
        (base / "out").mkdir()
        work = Work(base / "log", deadly=tuple(deadly))
        alone = Conversion(base / "out", units, [SIZE] * 2, "Skip {count}.", None, 1, len(deadly) - 1, isolated=True)
        words = rf"^{len(deadly)} documents? cannot be used \({len(deadly)} ended its process\).* Skip {len(deadly)}\."
        with pytest.raises(InputError, match=words):
            alone.convert(work, "working")
        dataclasses.replace(alone, workers=2, limit=len(deadly)).convert(work, "working")
        notes = [read_note(base / "out", number) for number in range(2)]
        written = [int(record) for split in ("train", "heldout") for note in notes if split in note.shards
                   for record in Records(base / "out", (note.shards[split],))]  # fmt: skip
        assert sorted(written) == sorted({*range(1, 21)} - deadly)
        assert [example for note in notes for example in note.examples] == [
            f"numbers:{number}: ended its process: twice" for number in sorted(deadly)]  # fmt: skip


def test_of_documents_encoded_together_only_those_that_end_processes_are_left_out(folder, tmp_path, tokenizer):
    texts = [f"text {number}" for number in range(600)]
    for number in (3, 300, 599):
        texts[number] = "deadly"
    path = write_jsonl(tmp_path / "in.jsonl", texts)
    units = [Unit("jsonl", (str(path),), 0, path.stat().st_size, path.stat().st_size)]
    work = Deadly(tokenizer, "digest", SpecialTokens(*["<|endoftext|>"] * 3), PrepareSettings(heldout=0))
    Conversion(folder, units, [units[0].bytes], "", None, 1, 3, isolated=True).convert(work, "working")
    note = read_note(folder, 0)
    (example,) = note.examples
    assert example.startswith(f"{path}:4: ended its process: ")
    assert all(words in example for words in ("SIGABRT", "use fewer workers, or split it"))
    assert note.alike == {example: [2, 301, 600]}
    assert note.skipped == {"ended its process": 3}
    assert note.shards["train"].documents == 597


def test_the_check_and_the_conversion_share_a_process(folder, work):
    alone = Conversion(folder, make_units(2), [SIZE] * 2, "", isolated=True)
    assert alone.check(Count(), "checking") == 4
    [worker] = alone.idle
    alone.convert(work, "working")
    assert {int(line.split()[1]) for line in work.log.read_text().splitlines()} == {worker.process.pid}
    assert worker.process.exitcode == 0


def test_no_worker_process_needs_shared_memory(tmp_path, tokenizer):
    path = write_jsonl(tmp_path / "in.jsonl", ["good", "good day"])
    command = ["unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o ro none /dev/shm && exec "$@"', "sh"]
    if subprocess.run([*command, "true"], check=False, capture_output=True).returncode:
        pytest.skip("This system lets a user mount no file system of their own (unshare -rm).")
    prepare = [sys.executable, "-m", "zaya_jax.data", "prepare", "--input", path, "--tokenizer", tokenizer,
               "--output", tmp_path / "out", "--workers", "1", "--heldout", "0"]  # fmt: skip
    done = subprocess.run([*command, *prepare], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_process_that_ends_while_it_reads_stops_the_work(folder, tmp_path):
    with pytest.raises(RunStopped, match=r"^A data worker process ended \(SIGABRT\) reading .*\(start=1, "
                       r".*Rerun the command to resume\.$"):  # fmt: skip
        run(folder, make_units(2), Work(tmp_path / "log", deadly=(-3,)), workers=2, limit=9)


def test_documents_that_cannot_be_used_are_counted_over_all_units(folder, tmp_path):
    work = Work(tmp_path / "log", bad=True)
    units = make_units(5)  # of 1 to 50, which have 7 multiples of 7
    with pytest.raises(
        InputError, match=r"^7 documents cannot be used \(7 sevenfold\), but at most 6 may be skipped\."
    ):
        run(folder, units, work, limit=6)
    before = started(work)
    run(folder, units, work, limit=7)
    assert started(work) == before  # what was done before the limit was reached stays done
    notes = [read_note(folder, number) for number in range(5)]
    assert sum(note.skipped["sevenfold"] for note in notes) == 7
    assert notes[0].examples == ["numbers:7: sevenfold: 7 is a multiple"]
    assert sum(shard.documents for note in notes for shard in note.shards.values()) == 43
    with pytest.raises(
        InputError, match=r"7 sevenfold.* at most 2 may be skipped"
    ):  # of what is noted, without any work
        run(folder, units, work, limit=2)
    assert started(work) == before


def test_all_are_counted_and_the_first_are_listed(folder, tmp_path):
    work = Work(tmp_path / "log", bad=True)
    with pytest.raises(
        InputError, match=r"^142 documents cannot be used \(142 sevenfold\), but at most 30 may"
    ) as error:
        run(folder, [Numbers(1, 1000)], work, limit=30)
    lines = str(error.value).splitlines()[1:]
    assert lines == [*(f"  numbers:{n}: sevenfold: {n} is a multiple" for n in range(7, 147, 7)), "  and 122 more"]


def test_a_script_that_begins_the_work_unguarded_is_told_so(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nfrom pathlib import Path\nfrom tests.data.convert_helpers import Numbers, Work\n"
        "from zaya_jax.data.prepare.shard_conversion import Conversion\n"
        "folder = Path(sys.argv[1])\nfolder.mkdir(exist_ok=True)\n"
        "units = [Numbers(1, 9), Numbers(9, 19)]\n"
        "Conversion(folder, units, [9, 9], '', None, 2, 0).convert(Work(folder.with_name('log')), 'working')\n"
    )
    done = subprocess.run([sys.executable, script, tmp_path / "out"], env={**os.environ, "PYTHONPATH": str(ROOT)},
                          capture_output=True, text=True, timeout=60, check=False)  # fmt: skip
    assert done.returncode == 1
    assert "put the script's work under `if __name__ == '__main__':`" in done.stderr
    assert "RunStopped: A data worker process ended" in done.stderr
    assert contents(tmp_path / "out") == {}
