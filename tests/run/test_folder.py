import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import shutil
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.train_helpers import STEP, change, run_tree, small_run, snapshot
from zaya_jax.config import (
    CheckpointConfig,
    EvaluationConfig,
    LoraConfig,
    ParallelConfig,
    SourceConfig,
    Table,
    load_config,
    to_dict,
    to_yaml,
)
from zaya_jax.config.checks import shown
from zaya_jax.errors import InputError
from zaya_jax.run.checkpoints import CHECKPOINTS, PHASES
from zaya_jax.run.fencing import FENCE, Fence
from zaya_jax.run.folder import (
    CHANGES,
    CONFIG,
    METRICS,
    claim_run,
    lock_folder,
    lock_run,
    read_config,
    record_changes,
    why_unlocked,
)

SECTIONS = {"checkpoint": CheckpointConfig, "evaluation": EvaluationConfig, "parallel": ParallelConfig}
FREE = {"run_dir", "profile", "train.log_every", "train.sinks", "data.cache_dir", "data.workers", "sample.prompt",
        "sample.tokens", "sample.temperature", "sample.every", "preset", "measurements", "train.batch.micro_batch",
        "train.remat", "train.spike.window", "train.spike.threshold", "train.max_skipped_steps", "data.skip_rows",
        "train.deterministic",
        *(f"{name}.{field.name}" for name in SECTIONS for field in dataclasses.fields(SECTIONS[name]))}  # fmt: skip


@contextlib.contextmanager
def claimed(config):
    """The folder of a run whose corpus was found good."""
    with lock_run(config) as folder:
        claim_run(folder, config)
        yield folder


def test_what_a_killed_process_was_writing_is_removed(tmp_path):
    config = small_run(tmp_path)
    with claimed(config) as folder:
        (folder / f"status.json.{'0' * 16}.partial").write_text("{")
        (folder / "notes.partial").write_text("mine")
    with lock_run(config):
        assert [path.name for path in folder.glob("*.partial")] == ["notes.partial"]


def test_a_refused_run_leaves_no_new_folder_and_every_other_as_it_was(tmp_path):
    config = small_run(tmp_path)
    folder = Path(config.run_dir)
    with pytest.raises(InputError, match="refused"), lock_run(config):
        raise InputError("refused")
    assert not folder.exists()
    folder.mkdir()
    with lock_run(config):
        pass
    assert folder.exists()
    with claimed(config):
        pass
    assert (folder / "config.yaml").exists()


def leaves(tree, prefix=""):
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def other(value):
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    if value is None:
        return 3
    if isinstance(value, int | float):
        return value + 1
    return f"{value}x" if isinstance(value, str) else (*value, "x")


@pytest.fixture
def config(tmp_path):
    return small_run(tmp_path)


@pytest.fixture
def claimed_run(config):
    """The folder of a run that has done something."""
    with claimed(config) as folder:
        (folder / METRICS).write_text('{"step": 1}\n')
        (folder / CHECKPOINTS).mkdir()
        Fence(folder / CHECKPOINTS).take({})
    return folder


def refused(config, folder, match):
    before = snapshot(folder)
    with pytest.raises(InputError, match=match) as caught, claimed(config):
        pytest.fail("the folder was given out")
    assert snapshot(folder) == before
    return str(caught.value)


def test_the_same_configuration_gets_its_folder_again(config, claimed_run):
    assert (claimed_run / CONFIG).read_text() == to_yaml(config)
    before = snapshot(claimed_run)
    with claimed(config) as folder:
        assert folder == claimed_run
    assert snapshot(claimed_run) == before


def test_a_configuration_of_a_shared_run_is_read_in_bounded_time_and_memory(config, claimed_run):
    """Others may write it; a long one may have many rows to skip, but aliases multiply nothing."""
    rows = tuple((2 * row, 2 * row + 1) for row in range(8000))
    text = to_yaml(change(config, {"data.skip_rows": rows}))
    (claimed_run / CONFIG).write_text(text)
    assert len(read_config(claimed_run)["data"]["skip_rows"]) == 8000
    aliases = "".join(f"x{level}: &x{level} [{', '.join([f'*x{level - 1}'] * 9)}]\n" for level in range(1, 6))
    for hostile in (f"{text}x0: &x0 [1, 2]\n{aliases}", f"{text}#{' ' * 2**20}"):
        (claimed_run / CONFIG).write_text(hostile)
        with pytest.raises(InputError, match=r"config\.yaml cannot be read"):
            read_config(claimed_run)


def test_any_other_configuration_is_refused_and_free_keys_are_not(config, claimed_run, tmp_path):
    keys = {key: tuple(value) if isinstance(value, list) else value for key, value in leaves(to_dict(config))}
    assert keys.keys() > FREE
    with claimed(change(config, {key: other(keys[key]) for key in FREE - {"run_dir"}})) as folder:
        assert folder == claimed_run
    tree = run_tree(tmp_path)
    tree["phases"][0]["name"] = "train"
    (claimed_run / CONFIG).write_text(yaml.safe_dump(tree))  # the same, and sooner read
    for key in keys.keys() - FREE - {"phases"}:  # what may change in phases depends on how far the run is
        old, new = (list(v) if isinstance(v, tuple) else v for v in (keys[key], other(keys[key])))
        message = refused(change(config, {key: other(keys[key])}), claimed_run,
                          rf"contains a run with a different configuration: {key} was ")  # fmt: skip
        assert f"was {shown(old)} and is now {shown(new)}." in message


@pytest.mark.parametrize(("changes", "message"), [
    ({"lora": LoraConfig(4, 8), "init_from": "runs/base", "seed": 7},
     r"seed was 0 and is now 7\. Other differences: init_from, lora\. Restore .*, or choose another run_dir: with "
     r"init_from=.*/run it starts from that run's weights\.$"),
    ({"optimizer.muon.learning_rate": 1.0, "optimizer.adamw.learning_rate": 1.0},
     r"Other differences: optimizer\.adamw\.learning_rate\. .*: with resume_from=.* if its phases have tokens left\.$"),
    ({"optimizer.muon.learning_rate": 1.0, "optimizer.muon.momentum": 0.5}, r"another run_dir: with init_from=.*/run"),
    ({"lora": LoraConfig(4, 8)}, r"lora was null and is now set\. Restore"),
    ({"data.sources": Table({"web": SourceConfig("data/web")})}, r"data\.sources was absent and is now set\. "),
    ({"model.num_layers": 1}, r" Restore the old value to resume that run, or choose another run_dir\.$"),
])  # fmt: skip
def test_the_section_that_differs_is_named_with_what_can_be_done(config, claimed_run, changes, message):
    refused(change(config, changes), claimed_run, message)


def test_changes_are_recorded_once_with_their_step(config, claimed_run):
    (phase,) = config.phases
    changed = change(config, {"train.spike.threshold": 20.0, "train.log_every": 7})
    changed = dataclasses.replace(changed, phases=(dataclasses.replace(phase, tokens=2048),))
    record_changes(claimed_run, config, 3)
    assert not (claimed_run / CHANGES).exists()
    for _ in range(2):
        record_changes(claimed_run, changed, 5)
        (line,) = (claimed_run / CHANGES).read_text().splitlines()
        assert json.loads(line) == {
            "step": 5, "changes": {"phases.train.tokens": [1536, 2048], "train.spike.threshold": [10.0, 20.0]}
        }  # fmt: skip
        assert load_config(claimed_run / CONFIG) == changed
        (claimed_run / CONFIG).write_text(to_yaml(config))  # as where a process is killed in between


def test_a_run_of_a_version_with_fewer_keys_resumes(config, claimed_run):
    """Version 0.1.0 had neither these keys nor the new names; their defaults do what it did."""
    tree = to_dict(config)
    for section, *names in (("model", "convolutions", "query_key_mean", "value_shift", "router_layers",
                             "depth_averaging"), ("train", "sinks"), ("optimizer", "balance")):  # fmt: skip
        for name in names:
            tree[section].pop(name)
    for name in ("lora", "resume_from", "measurements", "profile"):
        tree.pop(name)
    tree["train"]["batch"]["micro"] = tree["train"]["batch"].pop("micro_batch")
    (claimed_run / CONFIG).write_text(yaml.safe_dump(tree))
    with claimed(config):
        record_changes(claimed_run, config, 3)
    assert not (claimed_run / CHANGES).exists()
    refused(change(config, {"model.value_shift": False}), claimed_run, "model.value_shift was true and is now false")


def test_missing_keys_of_a_run_with_a_refused_value_have_defaults(claimed_run, config):
    tree = to_dict(config)
    del tree["resume_from"], tree["data"]["skip_rows"]
    tree["checkpoint"]["every"] = -1
    (claimed_run / CONFIG).write_text(yaml.safe_dump(tree))
    with claimed(config):
        pass


def test_rows_to_skip_are_recorded_and_their_key_may_be_missing(config, claimed_run):
    tree = to_dict(config)
    tree["data"].pop("skip_rows")
    (claimed_run / CONFIG).write_text(yaml.safe_dump(tree))  # as an earlier version does
    with claimed(config):
        record_changes(claimed_run, config, 3)
    assert not (claimed_run / CHANGES).exists()
    changed = change(config, {"data.skip_rows": ((7, 9),)})
    with claimed(changed):
        record_changes(claimed_run, changed, 5)
    assert json.loads((claimed_run / CHANGES).read_text()) == {"step": 5, "changes": {"data.skip_rows": [[], [[7, 9]]]}}
    assert load_config(claimed_run / CONFIG) == changed


@pytest.mark.parametrize(
    ("sources", "key"),
    [
        ({"web": SourceConfig("web")}, r"data\.sources\.web was absent and is now set"),
        ({"code": SourceConfig("code", 2.0)}, r"data\.sources\.code\.max_epochs was null and is now 2\.0"),
        ({}, r"data\.sources was set and is now absent"),
        ({"code": SourceConfig("code"), "web": SourceConfig("w")}, r"data\.sources\.web was absent"),
    ],
)
def test_other_sources_are_another_configuration(config, sources, key):
    before = change(config, {"data.sources": Table({"code": SourceConfig("code")})})
    with claimed(before) as folder:
        pass
    refused(change(config, {"data.sources": Table(sources)}), folder, key)
    with claimed(before):
        pass


@pytest.mark.parametrize(
    ("mixtures", "is_free"),
    [([{"a": 1}, {"a": 2}], True), ([{"a": 1}, {"a": 1, "b": 0}], False), ([{"a": 1}, {}], False)],
)
def test_a_source_that_no_phase_reads_or_evaluates_may_change(config, mixtures, is_free):
    phases = [dataclasses.replace(config.phases[0], name=f"p{i}", mixture=Table(m)) for i, m in enumerate(mixtures)]
    sources = {"a": SourceConfig("a"), "b": SourceConfig("b", 2.0)}
    config = change(config, {"phases": tuple(phases), "data.sources": Table(sources)})
    with claimed(config) as folder:
        pass
    changed = change(config, {"data.sources": Table({**sources, "b": SourceConfig("c")})})
    removed = change(config, {"data.sources": Table({"a": SourceConfig("a")})})
    for other_one in (changed, removed):
        if is_free:
            with claimed(other_one):
                pass
        else:
            refused(other_one, folder, r"data\.sources\.b.* was ")
    refused(
        change(config, {"data.sources": Table({**sources, "a": SourceConfig("a", 1.0)})}), folder, r"sources\.a\.max"
    )


def test_keys_of_the_corpus_that_a_run_with_sources_never_read_can_be_removed(config):
    sources = {"data.sources": Table({"code": SourceConfig("code")})}
    with claimed(change(config, sources | {"data.corpus": "texts", "data.heldout_fraction": 0.5})) as folder:
        pass
    with claimed(change(config, sources)):
        pass
    refused(config, folder, r"data\.corpus was 'texts'")


def test_sources_and_the_folder_can_be_moved(config, tmp_path):
    for path in ("code", "elsewhere"):
        with claimed(change(config, {"data.sources": Table({"code": SourceConfig(path)})})) as folder:
            pass
    folder.rename(tmp_path / "elsewhere")
    moved = {"run_dir": str(tmp_path / "elsewhere"), "data.sources": Table({"code": SourceConfig("code")})}
    with claimed(change(config, moved)):
        pass


@pytest.mark.parametrize("key", ["model.qk_gain", "train.warp"])
def test_a_key_that_no_longer_exists_is_named(config, claimed_run, key):
    section, _, name = key.partition(".")
    tree = to_dict(config)
    tree[section][name] = 7
    (claimed_run / CONFIG).write_text(yaml.safe_dump(tree))
    refused(config, claimed_run, rf"{key} was 7 and is now absent")


@pytest.mark.parametrize(
    "content",
    [b"", b"a list", b"- 1", b"a: [", b"\xff\xfe\xff", b"model: {vocab_size", b"[" * 60, b"phases: [{}]"],
    ids=lambda c: c[:20].decode("latin1"),
)
def test_a_configuration_that_cannot_be_read_is_refused(config, claimed_run, content):
    (claimed_run / CONFIG).write_bytes(content)
    refused(
        config,
        claimed_run,
        r"cannot be identified|contains a run with a different configuration",
    )


@pytest.mark.parametrize("name", [METRICS, CHECKPOINTS])
def test_a_run_without_a_configuration_is_refused(config, claimed_run, name):
    (claimed_run / CONFIG).unlink()
    if name == METRICS:
        shutil.rmtree(claimed_run / CHECKPOINTS)
    else:
        (claimed_run / METRICS).unlink()
    refused(config, claimed_run, f"contains {name} but no {CONFIG}")


@given(saved=st.booleans(), token=st.booleans(), rows=st.booleans(), ended=st.booleans())
def test_a_run_whose_checkpoints_are_gone_is_refused_and_one_that_never_had_any_starts_again(
    tmp_path_factory, saved, token, rows, ended
):
    parent = tmp_path_factory.mktemp("run")
    config = change(STEP, {"run_dir": str(parent / "run")})
    with claimed(config) as folder:
        (folder / CHECKPOINTS).mkdir()
        (folder / METRICS).write_text('{"step": 1}\n' if rows else "")
        (folder / PHASES).write_text('{"train": 1}' if ended else "{}")
        if token:
            Fence(folder / CHECKPOINTS).take({})
        if saved:
            (folder / CHECKPOINTS / "1").mkdir()
    if not saved and (ended or (rows and not token)):
        rest = f"{METRICS} has 1 step, and the run's {FENCE} is missing there"
        evidence = f"{PHASES} names that of step 1" if ended else rest
        message = refused(config, parent, evidence)
        assert message.startswith(f"{folder / CHECKPOINTS} has no checkpoint, but {evidence}")
    else:
        with claimed(config):
            pass


def test_a_file_in_the_way_is_refused(config, tmp_path):
    (tmp_path / "run").write_text("mine")
    refused(config, tmp_path, r"run_dir \(.*\) is a file, but must be a folder")
    below = change(config, {"run_dir": str(tmp_path / "run" / "below")})
    refused(below, tmp_path, r"run_dir \(.*\) cannot be written: ")


def test_one_process_at_a_time(config):
    with claimed(config), pytest.raises(InputError, match=r"run_dir \(.*\) is in use"), claimed(config):
        pass
    with claimed(config):
        pass


def no_lock(file, operation):
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


@pytest.mark.parametrize("flock", [no_lock, lambda file, operation: None])
def test_a_run_on_storage_without_locks_trains_and_says_once_what_protects_it(tmp_path, capsys, monkeypatch, flock):
    monkeypatch.setattr(fcntl, "flock", flock)
    with lock_run(small_run(tmp_path)) as folder:
        assert capsys.readouterr().err == (
            f"Warning: file locks do not work in run_dir ({folder}), so nothing refuses a second training of this run; "
            "instead, the first one stops when the second one takes the next fencing token.\n"
        )


def test_other_errors_of_a_lock_still_refuse_the_run(tmp_path, monkeypatch):
    def fail(file, operation):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(InputError, match="cannot be written: Input/output error"), lock_run(small_run(tmp_path)):
        pass


def test_a_working_lock_is_not_mentioned(tmp_path, capsys):
    with lock_run(small_run(tmp_path)):
        pass
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("options", "named"),
    [("rw,vers=3,nolock,local_lock=all,addr=10.0.0.1", "local_lock=all, nolock"),
     ("rw,local_lock=flock", "local_lock=flock"),
     ("rw,localflock,lazystatfs", "localflock"), ("rw,nobrl,vers=3.1.1", "nobrl"), ("rw,flock=local", "flock=local"),
     ("rw,local_lock=none,flock,user_xattr", ""), ("rw", "")],
)  # fmt: skip
def test_mount_options_that_make_locks_local_are_named(tmp_path, options, named):
    device, mounts = tmp_path.stat().st_dev, tmp_path / "mountinfo"
    mounts.write_text(f"22 1 0:99999 / / rw - ext4 /dev/x rw,nolock\n23 22 {os.major(device)}:{os.minor(device)} / "
                      f"/a\\040b rw,noatime shared:1 master:2 - nfs4 server:/x {options}\n")  # fmt: skip
    with lock_folder(tmp_path):
        reason = why_unlocked(tmp_path, mounts)
    assert reason == (f"file locks hold on one node only (mount option {named})" if named else "")
    assert why_unlocked(tmp_path, tmp_path / "none") == "file locks do not work"  # nobody holds this one
