import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.data.prepare_helpers import ROOT, contents, make_texts, write_lines
from zaya_jax.data import __main__ as data_main
from zaya_jax.data.__main__ import main
from zaya_jax.data.prepare import shard_conversion
from zaya_jax.data.prepare.manifest import MANIFEST
from zaya_jax.data.prepare.preparation import PrepareSettings, open_manifest, prepare
from zaya_jax.data.prepare.shards import Records
from zaya_jax.errors import RunStopped

TEXTS = make_texts(40)
# Runs the command and says which of the heavy libraries it has imported.
LOOK = """
import sys
from zaya_jax.data.__main__ import main
if __name__ == "__main__":
    status = main(sys.argv[1:])
    print("imported:", *sorted({"jax", "grain", "flax", "optax", "orbax", "torch"} & sys.modules.keys()))
    sys.exit(status)
"""


@pytest.fixture
def call(tokenizer, texts_file, tmp_path):
    """What every call of prepare here has."""
    return ["prepare", "--input", str(texts_file), "--tokenizer", str(tokenizer), "--output", str(tmp_path / "out"),
            "--workers", "1"]  # fmt: skip


def start(*command, **settings):
    """A process as a person starts it."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(list(map(str, command)), env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            text=True, **settings)  # fmt: skip


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "No space left on device. Free some space"),
        (RunStopped("A data worker process ended."), "Stopped: A data worker process ended.\n"),
    ],
)
def test_work_that_cannot_go_on_ends_the_command_with_a_sentence(call, monkeypatch, capsys, error, message):
    def fail(*_):
        raise error

    monkeypatch.setattr(shard_conversion, "write_atomically", fail)
    assert main(call) == 1
    assert message in capsys.readouterr().err


def test_prepare_suggests_a_fraction_where_it_holds_out_nothing(call, capsys, tmp_path):
    assert main([*call, "--heldout", "1e-9"]) == 0
    assert "No document is held out for evaluation. To hold out about 5, " in capsys.readouterr().out
    call[call.index("--output") + 1] += "-other"
    assert main([*call, "--heldout", "0.1"]) == 0
    assert "held out for evaluation" not in capsys.readouterr().out
    call[2] = str(write_lines(tmp_path / "one.jsonl", [{"text": "the only one"}]))
    call[call.index("--output") + 1] += "-one"
    assert main([*call, "--heldout", "1e-9"]) == 0
    assert "No document is held out for evaluation. Split the text" in capsys.readouterr().out
    call[call.index("--output") + 1] += "-all"
    assert main([*call, "--heldout", "1"]) == 0
    assert "No document is left to train on. To train, prepare into another --output" in capsys.readouterr().out


def test_prepare_prints_what_the_folder_holds(call, tmp_path, capsys):
    assert main([*call, "--heldout", "0.25"]) == 0
    manifest = open_manifest(tmp_path / "out")
    assert manifest.train.documents + manifest.heldout.documents == 40
    assert 0 < manifest.heldout.documents < 20
    out, err = capsys.readouterr()
    lines = [f"{tmp_path / 'out'} is complete."]
    for name, split in {"train": manifest.train, "heldout": manifest.heldout}.items():
        lines.append(f"  {name}: {split.documents:,} documents, {split.tokens:,} tokens, {split.text_bytes:,} bytes, "
                     "1 shard")  # fmt: skip
    assert out.splitlines() == lines
    assert [line.split(",")[0] for line in err.splitlines()] == ["data: checking: done", "data: preparing: done"]
    assert manifest.train.text_bytes + manifest.heldout.text_bytes == sum(len(text.encode()) for text in TEXTS)


def test_the_defaults_are_those_of_the_settings(call, tmp_path, texts_file, tokenizer):
    assert main(call) == 0
    prepare([str(texts_file)], tokenizer, tmp_path / "other", PrepareSettings(), workers=1)
    assert contents(tmp_path / "out") == contents(tmp_path / "other")


def test_tasks_say_what_comes_next_and_merge_prints_the_counts(call, tmp_path, capsys):
    output = tmp_path / "out"
    call[2:3] = map(str, [write_lines(tmp_path / f"{i}.jsonl", [{"text": f"{i} of {TEXTS}"}] * 9) for i in range(2)])
    assert main([*call, "--of", "2"]) == 0
    assert capsys.readouterr().out == (
        f"Task 0 of 2 is done. After the last one, run python -m zaya_jax.data merge {output}\n"
    )
    assert main(["merge", str(output)]) == 2
    assert r"1 of 2 tasks missing: 1. Run each of them with --task, then merge." in capsys.readouterr().err
    assert main([*call, "--of", "2", "--task", "1"]) == 0
    capsys.readouterr()
    assert main(["merge", str(output)]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"{output} is complete.\n  train: ")
    assert err == ""
    call[call.index(str(output))] = str(tmp_path / "alone")
    assert main(call) == 0
    assert contents(output) == contents(tmp_path / "alone")


def test_chat_reads_messages_unless_a_field_is_named(call, tmp_path, capsys):
    conversations = [[{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": str(i)}] for i in range(5)]
    for name, more in {"messages": [], "said": ["--field", "said"]}.items():
        path = write_lines(tmp_path / f"{name}.jsonl", [{name: conversation} for conversation in conversations])
        output = tmp_path / name
        call[2], call[6] = str(path), str(output)
        assert main([*call, "--chat", "--heldout", "0", *more]) == 0
        manifest = open_manifest(output)
        assert manifest.kind == "chat"
        assert [json.loads(record) for record in Records(output, manifest.train.shards)] == conversations
        assert "train: 5 documents" in capsys.readouterr().out


def test_each_problem_of_a_file_has_one_line_with_the_number_of_its_documents(call, tmp_path, capsys):
    counts = {"x": 30, "\x1b": 2, "y": 1}
    lines = [{key: 1} for key, count in counts.items() for _ in range(count)]
    call[2:3] = [str(write_lines(tmp_path / "bad.jsonl", lines)), *(str(tmp_path / f"{name}.txt") for name in "ab")]
    for path in call[3:5]:  # of one part of the input
        Path(path).write_bytes(b"\xff")
    assert main(call) == 2
    refusal = capsys.readouterr().err.splitlines()[-6:]
    assert refusal[0].startswith("Error: 35 documents cannot be used (33 no field, 2 not UTF-8).")
    places = [f"{call[2]}:{line}" for line in (1, 31, 33)] + [f"{path}:1" for path in call[3:5]]
    assert [line.split(": ")[0].strip() for line in refusal[1:]] == places
    also = f"{', '.join(map(str, range(2, 22)))} and 9 more)", "32)", "", "", ""
    assert [line.partition(" (also at ")[2] for line in refusal[1:]] == [*also]


@pytest.mark.parametrize("verb", ["prepare", "tokenizer"])
def test_only_what_goes_on_says_so_after_ctrl_c(verb, capsys, monkeypatch):
    def interrupted(options):
        raise KeyboardInterrupt

    monkeypatch.setattr(data_main, {"prepare": "_prepare", "tokenizer": "_train_tokenizer"}[verb], interrupted)
    needed = {"prepare": ["--tokenizer", "t"], "tokenizer": []}[verb]
    assert main([verb, "--input", "a", "--output", "b", *needed]) == 130
    assert ("Rerun" in capsys.readouterr().err) == (verb == "prepare")


def test_options_reach_the_preparation(call, tmp_path, capsys):
    (tmp_path / "texts").mkdir()
    for name, text in {"a.md": "one", "b.rst": "two", "c.txt": "left out", "d.md": " "}.items():
        (tmp_path / "texts" / name).write_text(text)
    call[2] = str(tmp_path / "texts")
    more = ["--suffixes", ".md", ".rst", "--heldout", "0", "--eot", "<|endoftext|>"]
    assert main([*call, *more]) == 2
    assert f"{tmp_path}/texts/d.md:1: empty: " in capsys.readouterr().err
    assert main([*call, *more, "--max-bad", "1"]) == 0
    out = capsys.readouterr().out
    assert "train: 2 documents" in out
    assert "  skipped, empty: 1\n" in out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--heldout", "1.5"], "Error: --heldout is 1.5, "),
        (["--eot", "<|end|>"], "has no token '<|end|>' "),
        (["--field", "body"], "no field: "),
    ],
)
def test_bad_input_has_status_2_and_a_sentence(call, tmp_path, capsys, more, message):
    assert main([*call, *more]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert "Traceback" not in err
    assert not (tmp_path / "out" / MANIFEST).exists()


@pytest.mark.parametrize("arguments", [[], ["prepare"], ["prepare", "--input", "a"], ["merge"], ["mend"]])
def test_a_command_that_is_not_complete_has_status_2_and_shows_the_usage(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith("usage: python -m zaya_jax.data")


def test_the_command_imports_neither_jax_nor_grain(call, tmp_path):
    process = start(sys.executable, "-c", LOOK, *call)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert out.endswith("\nimported:\n")
    assert (tmp_path / "out" / MANIFEST).exists()


@pytest.fixture
def ctrl_c_arrives():
    """A shell starts background jobs with Ctrl-C ignored, which processes hand on; what is handled they do not."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c_arrives")
def test_ctrl_c_has_status_130_and_the_same_command_goes_on(call, tmp_path):
    call[2] = str(write_lines(tmp_path / "long.jsonl", [{"text": " ".join(TEXTS)}] * 2500))
    process = start(sys.executable, "-m", "zaya_jax.data", *call)
    until = time.monotonic() + 30
    while not list((tmp_path / "out").glob("*.partial")) and time.monotonic() < until:
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, ""), err
    assert err.splitlines()[1:] == ["Stopped by Ctrl-C. Rerun the command to resume."]
    assert not list((tmp_path / "out").glob("*.partial"))
