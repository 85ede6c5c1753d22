"""Documents that cannot be used, and calls that are refused before anything is written."""

import dataclasses
import os
from pathlib import Path

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from tests.data.prepare_helpers import (
    CHAT,
    QUARTER,
    check_same,
    contents,
    make_texts,
    read_back,
    write_jsonl,
    write_lines,
    write_megatron,
)
from zaya_jax.data.chat.template import load_template
from zaya_jax.data.prepare.manifest import MANIFEST
from zaya_jax.data.prepare.preparation import PrepareSettings, merge, open_manifest, prepare, summary
from zaya_jax.data.tokenizer import train_tokenizer
from zaya_jax.errors import InputError

# --- documents that cannot be used -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "reason", "detail"),
    [
        (b'{"text": "a"', "invalid JSON", "delimiter"),
        (b'{"messages": [{"role": "user"}]}', "no field", "it has 'messages', and --chat reads conversations"),
        (b'{"id": 1, "body": "a"}', "no field", "its keys are 'id', 'body'"),
        (b'{"text": [{"role": "user", "content": "a"}]}', "wrong type", "--chat"),
        (b'{"instruction": "a", "input": "b"}', "no field", "its keys are 'instruction', 'input'"),
    ],
)
def test_a_document_that_cannot_be_used_is_refused_and_told_where_it_is(tmp_path, tokenizer, line, reason, detail):
    texts, output = make_texts(30), tmp_path / "out"
    lines = [{"text": text} for text in texts]
    path = write_lines(tmp_path / "in.jsonl", [*lines[:20], b"", line, *lines[20:]])  # a blank line counts as one
    with pytest.raises(InputError) as error:
        prepare([str(path)], tokenizer, output, QUARTER, unit_bytes=400, workers=1)
    first, *rest = str(error.value).splitlines()
    assert first == f"1 document cannot be used (1 {reason}). Fix them, or skip up to 1 with --max-bad 1."
    assert len(rest) == 1
    assert rest[0].startswith(f"  {path}:22: {reason}: ")
    assert detail in rest[0]
    assert not output.exists()
    manifest = prepare([str(path)], tokenizer, output, QUARTER, unit_bytes=400, workers=1, max_bad=1)
    assert manifest.counts == {reason: 1}
    assert manifest.examples == (rest[0].strip(),)
    check_same(texts, read_back(output))
    assert f"skipped, {reason}: 1\n    {rest[0].strip()}" in summary(output, manifest)


def test_what_is_left_of_nothing_is_not_offered_and_half_a_question_is_named(tmp_path, tokenizer):
    path = write_lines(tmp_path / "in.jsonl", [{"instruction": "Add.", "input": "1 + 1"}] * 3)
    settings = dataclasses.replace(QUARTER, kind="chat", field="messages")
    with pytest.raises(InputError, match=r"^3 documents cannot be used \(3 no field\)\. Fix them: no doc") as error:
        prepare([str(path)], tokenizer, tmp_path / "out", settings, workers=1)
    assert "it has 'instruction', but no 'output', which would be the answer" in str(error.value)
    with pytest.raises(InputError, match=r"skip up to \d with --max-bad"):  # other tasks may have usable documents
        prepare([str(path)], tokenizer, tmp_path / "of", settings, unit_bytes=9, workers=1, task=1, tasks=2)


def test_what_is_no_prepared_folder_or_template_is_refused_with_what_to_type(tmp_path):
    path = write_lines(tmp_path / "in.jsonl", [{"text": "a"}])
    (tmp_path / "recipes").mkdir()
    (tmp_path / "chat.jinja").touch()
    for call, message in (
        (
            lambda: open_manifest(path),
            r"is a file, not a prepared folder\. Run python -m zaya_jax\.data prepare --input",
        ),
        (lambda: open_manifest(tmp_path / "recipe"), r"does not exist\. Did you mean .*/recipes\?"),
        (lambda: open_manifest(tmp_path / "zzz"), r"does not exist\. Create it with python -m zaya_jax\.data prepare"),
        (lambda: load_template(str(tmp_path / "chat.jinj")), r"cannot be read: .*\. Did you mean .*/chat\.jinja\?"),
    ):
        with pytest.raises(InputError, match=message):
            call()


def test_what_only_encoding_finds_is_reported_once_all_is_read(tmp_path):
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "</s>": 1, "b": 2}, "a"))  # where it is not special
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.save(str(tmp_path / "tokenizer.json"))
    lines = ["a </s> b" if i % 10 == 0 else "a b" for i in range(40)]
    path, output = write_jsonl(tmp_path / "in.jsonl", lines), tmp_path / "out"
    call = {"inputs": [str(path)], "tokenizer": tmp_path / "tokenizer.json", "output": output, "workers": 1}
    with pytest.raises(
        InputError, match=r"^4 documents cannot be used \(4 end token inside\)\. Fix them, or skip up to 4"
    ):
        prepare(settings=QUARTER, unit_bytes=200, **call)
    done = {note: note.stat().st_mtime_ns for note in output.glob("unit-*.json")}
    assert len(done) > 3
    with pytest.raises(InputError, match="is incomplete; rerun the prepare command"):
        merge(output)
    assert not (output / MANIFEST).exists()
    with pytest.raises(InputError, match=r"^4 documents .* at most 3 may be skipped"):
        prepare(settings=QUARTER, unit_bytes=200, max_bad=3, **call)
    assert {note: note.stat().st_mtime_ns for note in done} == done  # what is done is not done again
    assert prepare(settings=QUARTER, unit_bytes=200, max_bad=4, **call).counts == {"end token inside": 4}


# --- what is refused -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task": 3, "tasks": 3}, r"^--task is 3, but must be at least 0 and below --of \(3\)"),
        ({"task": -1}, "^--task is -1, "),
        ({"tasks": 0}, "^--task is 0, "),
        ({"workers": 0}, "^--workers is 0, "),
        ({"max_bad": -1}, "^--max-bad is -1, "),
        ({"settings": PrepareSettings(heldout=1.5)}, r"^--heldout is 1\.5, "),
        ({"settings": PrepareSettings(heldout=-0.1)}, r"^--heldout is -0\.1, "),
        ({"settings": PrepareSettings(heldout=float("nan"))}, r"^--heldout is \.nan"),
        ({"settings": PrepareSettings(eot="<|end|>")}, r"has no token '<\|end\|>' to end a document"),
        ({"tokenizer": Path("missing.json")}, r"^The tokenizer file missing\.json cannot be read"),
        ({"inputs": ["missing.jsonl"]}, r"^The input missing\.jsonl cannot be read"),
    ],
)
def test_a_value_that_cannot_be_is_refused_before_all_else(tmp_path, tokenizer, texts_file, change, message):
    call = {"inputs": [str(texts_file)], "tokenizer": tokenizer, "settings": QUARTER, "workers": 1, **change}
    with pytest.raises(InputError, match=message):
        prepare(output=tmp_path / "out", **call)
    assert not (tmp_path / "out").exists()


def test_an_output_that_is_or_lies_below_a_file_is_refused(tmp_path, tokenizer, texts_file):
    with pytest.raises(InputError, match=r"^--output is '.*in\.jsonl', but must be a folder"):
        prepare([str(texts_file)], tokenizer, texts_file, QUARTER, workers=1)
    with pytest.raises(InputError, match=r"^--output \(.*in\.jsonl/out\) cannot be written: Not a directory"):
        prepare([str(texts_file)], tokenizer, texts_file / "out", QUARTER, workers=1)


def test_a_finished_folder_is_left_as_it_is_and_refused_to_others(tmp_path, tokenizer, texts_file):
    output = tmp_path / "out"
    call = {"inputs": [str(texts_file)], "tokenizer": tokenizer, "output": output, "workers": 1}
    manifest = prepare(settings=QUARTER, **call)
    before = contents(output)
    assert prepare(settings=QUARTER, **call) == manifest
    assert prepare(settings=QUARTER, **call, task=1, tasks=2) == manifest  # of documents that are the same
    assert contents(output) == before
    with pytest.raises(
        InputError, match=f"^The folder {output} contains data prepared from different inputs or settings"
    ):
        prepare(settings=PrepareSettings(heldout=0.5), **call)
    write_jsonl(texts_file, make_texts(41))
    with pytest.raises(InputError, match="different inputs or settings"):
        prepare(settings=QUARTER, **call)
    assert contents(output) == before


def test_a_finished_folder_with_a_damaged_shard_is_not_taken_for_complete(tmp_path, tokenizer, texts_file):
    call = {"inputs": [str(texts_file)], "tokenizer": tokenizer, "output": tmp_path / "out", "settings": QUARTER}
    shard = tmp_path / "out" / prepare(workers=1, **call).train.shards[0].file
    os.truncate(shard, shard.stat().st_size - 1)
    with pytest.raises(InputError, match=f"The data file {shard} "):
        prepare(workers=1, **call)


def test_a_folder_of_something_else_is_left_alone(tmp_path, tokenizer, texts_file):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("text")
    with pytest.raises(InputError, match=r"mine contains other files, such as 'letter\.txt'"):
        prepare([str(texts_file)], tokenizer, tmp_path / "mine", QUARTER, workers=1)
    assert contents(tmp_path / "mine") == {"letter.txt": b"text"}


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"settings": PrepareSettings(heldout=0.5)}, r"a different --heldout: 0\.25, now 0\.5"),
        ({"settings": PrepareSettings(field="body", heldout=0.25)}, "a different --field: 'text', now 'body'"),
        ({"settings": CHAT}, "a different --chat: 'tokens', now 'chat'"),
        ({"settings": PrepareSettings(suffixes=(".md",), heldout=0.25)}, "a different --suffixes"),
        ({"tasks": 3}, "a different --of: 2, now 3"),
        ({"unit_bytes": 2000}, r"a different number of input units: \d+, now \d"),
        ({"tokenizer": "other.json"}, "a different --tokenizer"),
        ({"inputs": ["other.jsonl"]}, "a different --input"),
        ({"changed": "size"}, "other input files"),
        ({"changed": "time"}, "other input files"),
    ],
)
def test_an_unfinished_folder_is_refused_to_another_preparation(tmp_path, tokenizer, texts_file, change, key):
    train_tokenizer(["a b c"], 280).save(tmp_path / "other.json")
    write_jsonl(tmp_path / "other.jsonl", make_texts(40, seed=1))
    call = {"inputs": [str(texts_file)], "tokenizer": tokenizer, "settings": QUARTER, "tasks": 2, "unit_bytes": 900}
    output = tmp_path / "out"
    assert prepare(output=output, workers=1, **call) is None
    before = contents(output)
    if change.get("changed") == "size":
        write_jsonl(texts_file, make_texts(41))
    elif change.get("changed") == "time":
        os.utime(texts_file, (1, 1))
    else:
        call |= change
        call |= {"tokenizer": tmp_path / call["tokenizer"], "inputs": [str(tmp_path / call["inputs"][0])]}
    with pytest.raises(InputError, match=f"^The folder {output} contains an unfinished preparation with {key}"):
        prepare(output=output, workers=1, **call)
    assert contents(output) == before


def test_a_megatron_index_that_changed_is_noticed(tmp_path, tokenizer):
    path = write_megatron(tmp_path / "in", [[[5, 6, 7, 8]], [[9, 10]], [[11, 12]]])
    call = {"inputs": [str(path)], "tokenizer": tokenizer, "settings": QUARTER, "tasks": 2, "unit_bytes": 8}
    prepare(output=tmp_path / "out", workers=1, **call)
    stat = path.stat()
    write_megatron(tmp_path / "in", [[[5, 6]], [[7, 8, 9, 10]], [[11, 12]]])
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # the same tokens in the .bin
    with pytest.raises(InputError, match="unfinished preparation with other input files"):
        prepare(output=tmp_path / "out", workers=1, task=1, **call)
