"""The shares of several tasks, merged once all are there."""

import json

import pytest

from tests.data.prepare_helpers import QUARTER, check_same, contents, make_texts, read_back
from zaya_jax.data.prepare.preparation import merge, missing_tasks, open_manifest, prepare
from zaya_jax.data.prepare.shard_conversion import read_note
from zaya_jax.errors import InputError


def test_tasks_that_are_missing_are_named_with_what_to_do(tmp_path, tokenizer, texts_file):
    output = tmp_path / "out"
    call = {"inputs": [str(texts_file)], "tokenizer": tokenizer, "output": output, "settings": QUARTER}
    call |= {"unit_bytes": 900, "tasks": 3, "workers": 1}
    prepare(task=1, **call)
    for look in (merge, open_manifest):
        with pytest.raises(InputError, match=r"2 of 3 tasks missing: 0, 2\. Run each of them with --task, then merge"):
            look(output)
    prepare(task=0, **call)
    assert missing_tasks(output) == [2]
    for look in (merge, open_manifest):
        with pytest.raises(InputError, match=r"1 of 3 tasks missing: 2\."):
            look(output)
    prepare(task=2, **call)
    with pytest.raises(InputError, match=f"is not merged; run python -m zaya_jax.data merge {output}"):
        open_manifest(output)
    assert merge(output) == open_manifest(output)
    check_same(make_texts(40), read_back(output))


def test_a_folder_without_a_preparation_is_not_merged(tmp_path):
    (tmp_path / "file").write_text("text")
    with pytest.raises(
        InputError, match=rf"^The folder {tmp_path} contains no preparation: .*plan\.json cannot be read"
    ):
        merge(tmp_path)
    assert contents(tmp_path) == {"file": b"text"}
    for path in (tmp_path / "file", tmp_path / "missing"):
        with pytest.raises(InputError, match=f"^{path} is not a folder; pass the --output folder of prepare"):
            merge(path)
    assert not (tmp_path / "missing").exists()


def test_tasks_without_a_document_that_can_be_used_are_not_merged(tmp_path, tokenizer):
    (tmp_path / "bad.jsonl").write_text('{"other": 1}\n' * 2)
    for task in range(2):
        prepare([str(tmp_path / "bad.jsonl")], tokenizer, tmp_path / "out", QUARTER, max_bad=9, workers=1, task=task,
                tasks=2, unit_bytes=9)  # fmt: skip
    with pytest.raises(InputError, match=r"The inputs of .*out contain no document that can be used"):
        merge(tmp_path / "out")


def test_a_plan_without_the_token_that_begins_documents_is_finished(tmp_path, tokenizer, texts_file):
    call = {"inputs": [str(texts_file)], "tokenizer": tokenizer, "settings": QUARTER, "workers": 1, "tasks": 2}
    prepare(output=tmp_path / "out", task=0, **call)
    plan = json.loads((tmp_path / "out" / "plan.json").read_text())
    del plan["bos"], plan["eos"]
    (tmp_path / "out" / "plan.json").write_text(json.dumps(plan))
    prepare(output=tmp_path / "out", task=1, **call)
    manifest = merge(tmp_path / "out")
    assert manifest.special == (manifest.eot,) * 3


def test_a_plan_of_another_version_is_not_merged(tmp_path, tokenizer, texts_file):
    prepare([str(texts_file)], tokenizer, tmp_path / "out", QUARTER, workers=1, tasks=2)
    plan = json.loads((tmp_path / "out" / "plan.json").read_text())
    (tmp_path / "out" / "plan.json").write_text(json.dumps({**plan, "format": 99}))
    with pytest.raises(InputError, match="it has format 99, but this version reads format 2"):
        merge(tmp_path / "out")


def test_a_shard_that_is_gone_before_the_merge_is_written_again(tmp_path, tokenizer, texts_file):
    output = tmp_path / "out"
    call = {"inputs": [str(texts_file)], "tokenizer": tokenizer, "settings": QUARTER, "unit_bytes": 900, "workers": 1}
    prepare(output=tmp_path / "good", **call)
    for task in (0, 1):
        prepare(output=output, task=task, tasks=2, **call)
    assert missing_tasks(output) == []
    shard = output / "train-000003.arrayrecord"
    shard.unlink()
    assert read_note(output, 3) is None
    assert missing_tasks(output) == [1]
    with pytest.raises(InputError, match=r"1 of 2 tasks missing: 1\."):
        merge(output)
    other = (output / "train-000001.arrayrecord").stat().st_mtime_ns
    prepare(output=output, task=1, tasks=2, **call)
    assert (output / "train-000001.arrayrecord").stat().st_mtime_ns == other
    merge(output)
    assert contents(output) == contents(tmp_path / "good")
