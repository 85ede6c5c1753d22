"""`python -m zaya_jax.checkpoint`: ls, verify, inspect, diff, prune and rollback."""

import fcntl
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.checkpoint.saved_helpers import flip, save_run
from tests.hf.test_safetensors import VALUES
from tests.train_helpers import MODEL, ROOT, snapshot
from zaya_jax.checkpoint import __main__ as module
from zaya_jax.checkpoint.__main__ import main
from zaya_jax.checkpoint.commands import prune
from zaya_jax.config import CheckpointConfig, load_config, to_dict
from zaya_jax.errors import InputError, RunStopped
from zaya_jax.run.checkpoints import checkpoint_folder, saved_steps
from zaya_jax.run.digests import digest
from zaya_jax.run.run import open_run
from zaya_jax.run.status import track_status
from zaya_jax.run.table import size_text


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Three checkpoints, that of step 2 pinned and that of step 3 damaged."""
    folder = save_run(tmp_path_factory.mktemp("run"), [1, 2, 3], {2: 1.5})
    (folder / "checkpoints" / "2" / "PINNED").touch()
    flip(folder / "checkpoints" / "3")
    (folder / "checkpoints" / "0.corrupt-20260101T000000").mkdir()
    return folder


def printed(capsys, *arguments):
    status = main([str(argument) for argument in arguments])
    return status, capsys.readouterr()


def test_ls_has_a_line_for_each(run, capsys):
    status, text = printed(capsys, "ls", run)
    lines = text.out.splitlines()
    assert status == 0
    assert [line.split()[0] for line in lines[1:4]] == ["1", "2", "3"]
    assert "1.5000" in lines[2]
    assert lines[2].endswith("pinned")
    assert lines[4:] == ["quarantined: 0.corrupt-20260101T000000"]
    with pytest.raises(RunStopped), track_status(run):
        raise RunStopped("Nothing could be saved.")
    status, text = printed(capsys, "ls", run)
    assert text.out.splitlines()[-1].startswith("stopped with exit status 1 (process ")
    assert text.out.endswith("Nothing could be saved.\n")


def test_verify_names_what_is_damaged_and_ends_with_one(run, capsys):
    status, text = printed(capsys, "verify", run / "checkpoints" / "1")
    assert (status, "OK, all checksums match (5 arrays" in text.out) == (0, True)
    status, text = printed(capsys, "verify", run)
    assert status == 1
    assert "checkpoints/3" in text.out
    status, text = printed(capsys, "verify", "--all", run)
    assert status == 1
    assert text.out.count("OK, all checksums match (5 arrays") == 2


def test_inspect_gives_norms(run, capsys):
    status, text = printed(capsys, "inspect", run / "checkpoints" / "2")
    assert status == 0
    (line,) = [line for line in text.out.splitlines() if line.startswith("balance.")]
    assert line.split()[1:] == ["float32", "2×4", f"{(8 * 4) ** 0.5:.6g}", "2"]


def test_diff_is_empty_for_equal_ones_alone(run, capsys, tmp_path):
    assert printed(capsys, "diff", run / "checkpoints" / "1", run / "checkpoints" / "1") == (
        0,
        ("The checkpoints are identical.\n", ""),
    )
    status, text = printed(capsys, "diff", run / "checkpoints" / "1", run / "checkpoints" / "2")
    assert status == 1
    assert "step: max abs diff 1," in text.out
    other = save_run(tmp_path, [1], seed=5)
    status, text = printed(capsys, "diff", run / "checkpoints" / "1", other)
    assert (status, text.out) == (1, "seed: 0 vs 5\n")


@pytest.mark.parametrize("verb", ["ls", "verify", "inspect"])
def test_what_is_no_run_is_refused(verb, tmp_path, capsys):
    status, text = printed(capsys, verb, tmp_path / "nothing")
    assert status == 2
    assert text.err.startswith("Error: ")
    assert "nothing" in text.err


@pytest.mark.parametrize(("size", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (1.5e9, "1.5 GB"),
                                            (2e15, "2000.0 TB")])  # fmt: skip
def test_sizes_read_well(size, text):
    assert size_text(size) == text


def test_the_document_shows_what_there_is(tmp_path):
    text = (ROOT / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    commands = re.findall(r"^python -m zaya_jax\.checkpoint (.*)$", text, re.MULTILINE)
    verbs = {module._parser().parse_args(shlex.split(command)).verb for command in commands}
    assert verbs == {"ls", "verify", "inspect", "diff", "prune", "rollback", "average", "export-hf", "import-hf",
                     "verify-hf"}  # fmt: skip
    (section,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    (tmp_path / "config.yaml").write_text(f"extends: {ROOT / 'configs' / 'tiny.yaml'}\n{section}")
    assert load_config(tmp_path / "config.yaml").checkpoint.verify == "readback"
    assert yaml.safe_load(section)["checkpoint"]["keep_best"] == 1


def places(tree, at=()):
    """Every place in a JSON value, as the keys that lead there."""
    yield at
    for key, inner in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        yield from places(inner, (*at, key))


def replaced(tree, at, value):
    if not at:
        return value
    changed = tree.copy()
    changed[at[0]] = replaced(tree[at[0]], at[1:], value)
    return changed


def write_manifest(folder, content):
    """As the manifest of a checkpoint, with the digest that its content has."""
    for path in folder.glob("manifest-*"):
        path.unlink()
    (folder / f"manifest-{digest(content)}.json").write_bytes(content)


@pytest.fixture(scope="module")
def changing(tmp_path_factory):
    """Two checkpoints, and the manifest of the second."""
    config = {"model": to_dict(MODEL), "lora": None, "init_from": None, "phases": [{"name": "one"}]}
    folder = save_run(tmp_path_factory.mktemp("changing") / "run", [1, 2], **config) / "checkpoints" / "2"
    return folder, json.loads(next(folder.glob("manifest-*")).read_bytes())


@given(data=st.data())
def test_a_manifest_of_any_json_ends_in_a_sentence(changing, data):
    folder, tree = changing
    at = data.draw(st.sampled_from(list(places(tree))))
    write_manifest(folder, json.dumps(replaced(tree, at, data.draw(VALUES))).encode())
    other, out = str(folder.parent / "1"), folder.parents[2] / "out"
    for command in (["ls", str(folder.parents[1])], ["verify", str(folder)], ["inspect", str(folder)],
                    ["diff", other, str(folder)], ["average", other, str(folder), "--output", str(out)],
                    ["export-hf", str(folder), str(out)]):  # fmt: skip
        assert main(command) in (0, 1, 2)
        shutil.rmtree(out, ignore_errors=True)


def test_files_that_are_nested_without_end_are_answered(tmp_path, capsys):
    folder = save_run(tmp_path / "run", [1, 2]) / "checkpoints" / "2"
    deep = b'{"a":' * 10**5
    (tmp_path / "run" / "phases.json").write_bytes(deep)
    assert printed(capsys, "inspect", f"{tmp_path}/run@one")[0] == 2
    (tmp_path / "run" / "phases.json").write_text("[7]")
    assert printed(capsys, "inspect", f"{tmp_path}/run@one")[0] == 2
    assert printed(capsys, "prune", tmp_path / "run", "--keep", "1", "--dry-run")[0] == 2
    (tmp_path / "run" / "checkpoints" / "GENERATION").write_bytes(deep)
    assert printed(capsys, "ls", tmp_path / "run")[0] == 0
    write_manifest(folder, deep)
    status, text = printed(capsys, "verify", folder)
    assert status == 2 or "is not a checkpoint manifest" in text.out
    assert printed(capsys, "inspect", tmp_path / "run")[0] == 0  # the newest checkpoint that has a manifest


@pytest.fixture(scope="module")
def five(tmp_path_factory):
    return save_run(tmp_path_factory.mktemp("five"), [1, 2, 3, 4, 5], {2: 2.0, 3: 1.0, 4: 1.5})


@pytest.mark.parametrize(("config", "kept"), [
    ({"keep": 1}, [5]),
    ({"keep": 2}, [4, 5]),
    ({"keep": 1, "keep_every": 2}, [2, 4, 5]),
    ({"keep": 1, "keep_best": 1}, [3, 5]),
])  # fmt: skip
def test_what_is_to_be_kept_is(five, tmp_path, config, kept):
    run = Path(shutil.copytree(five, tmp_path / "run"))
    text = prune(run, CheckpointConfig(**config), dry_run=True)
    assert text.startswith("Would remove 1")
    assert saved_steps(run / "checkpoints") == [1, 2, 3, 4, 5]
    assert prune(run, CheckpointConfig(**config)).replace("Removed", "Would remove") == text
    assert saved_steps(run / "checkpoints") == kept
    assert sorted(path.name for path in (run / "checkpoints").iterdir() if path.is_dir()) == [str(s) for s in kept]


def test_the_newest_whole_one_stays_though_newer_ones_are_damaged(tmp_path):
    run = save_run(tmp_path, [1, 2, 3, 4])
    flip(run / "checkpoints" / "3")
    flip(run / "checkpoints" / "4")
    text = prune(run, CheckpointConfig(keep=1))
    assert "Damaged checkpoints were kept: 3, 4" in text
    assert saved_steps(run / "checkpoints") == [2, 3, 4]


def test_nothing_is_removed_where_nothing_is_whole(tmp_path):
    run = save_run(tmp_path, [1, 2])
    for step in (1, 2):
        flip(run / "checkpoints" / str(step))
    with pytest.raises(InputError, match=r"No checkpoint in .* is intact, so none was removed"):
        prune(run, CheckpointConfig(keep=1))
    assert saved_steps(run / "checkpoints") == [1, 2]


def test_a_run_that_trains_is_left_alone(tmp_path):
    run = save_run(tmp_path, [1, 2])
    with (run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(InputError, match="in use"):
            prune(run, CheckpointConfig(keep=1))
    assert saved_steps(run / "checkpoints") == [1, 2]


def test_numbers_out_of_range_are_refused(tmp_path, capsys):
    run = save_run(tmp_path, [1, 2])
    for wrong in (["--keep", "0"], ["--keep", "1", "--keep-every", "0"], ["--keep", "1", "--keep-best", "-1"]):
        assert printed(capsys, "prune", run, *wrong)[0] == 2
    assert saved_steps(run / "checkpoints") == [1, 2]


def test_a_run_is_rolled_back_and_loses_nothing(tmp_path, capsys):
    run = save_run(tmp_path, [1, 2, 3])
    folder = run / "checkpoints"
    before = snapshot(folder)
    flip(folder / "3")  # a damaged one is no hindrance
    damaged = snapshot(folder / "3")
    status, text = printed(capsys, "rollback", run, 2)
    (quarantined,) = open_run(run).quarantined
    assert (status, text.out) == (0, f"The run resumes from step 2. Quarantined: {quarantined.name}.\n")
    assert snapshot(quarantined) == damaged
    assert checkpoint_folder(str(run)) == folder / "2"
    printed(capsys, "rollback", run, 1)
    assert saved_steps(folder) == [1]
    assert [path.name.partition("-")[0] for path in open_run(run).quarantined] == ["2.stale", "3.stale"]
    after = snapshot(folder)
    assert {name: content for name, content in after.items() if name.split("/")[0] == "1"} == {
        name: content for name, content in before.items() if name.split("/")[0] == "1"
    }
    assert printed(capsys, "rollback", run, 1)[1].out == "The run resumes from step 1. Quarantined: nothing.\n"
    assert snapshot(folder) == after


def test_a_run_is_not_rolled_back_to_what_cannot_be_restored(tmp_path, capsys):
    run = save_run(tmp_path, [1, 2, 3])
    flip(run / "checkpoints" / "1")
    before = snapshot(run)
    for step, match in (
        (1, "does not match its checksum. Choose another checkpoint"),
        (0, "must be one of .*: 1, 2, 3"),
    ):
        status, text = printed(capsys, "rollback", run, step)
        assert status == 2
        assert re.search(match, text.err)
    with (run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        status, text = printed(capsys, "rollback", run, 2)
        assert (status, "in use" in text.err) == (2, True)
    assert snapshot(run) == before
