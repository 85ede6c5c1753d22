"""Several real processes on one machine are one job."""

import shutil
import threading
import time

import jax
import numpy as np
import pytest

from tests.parallel.processes_helpers import Link, finish_job, free_port, start_job, wide_everywhere
from tests.train_helpers import ROOT, leaves, restore, small_run, write_run
from zaya_jax.config import load_config
from zaya_jax.errors import InputError
from zaya_jax.parallel.processes import join, launcher, lost
from zaya_jax.train.loop import train
from zaya_jax.train.run_folder import METRICS
from zaya_jax.train.tracker import read_rows

SAME = ["train.compute_dtype=float64", "train.batch.micro=1", "evaluation.batch=4", "sample.tokens=1"]
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1"}
IMPATIENT = """
import zaya_jax.config.presets as p
p.PRESETS["cpu"] = p.PRESETS["cpu"]._replace(join_seconds=4, silence_seconds=5)
"""


def command(folder, run, *overrides):
    return ["--config", str(write_run(folder, run)), *SAME, *overrides]


def losses(folder, run):
    return [[row["step"], row["loss"], row["grad_norm"]] for row in read_rows(folder / run / METRICS)]


def ended(found, status=0):
    assert [code for code, _ in found] == [status] * len(found), "\n\n".join(text for _, text in found)
    return [text for _, text in found]


def test_processes_train_as_one_does_and_leave_a_checkpoint_for_one(tmp_path):
    said = ended(finish_job(tmp_path, start_job(tmp_path, [command(tmp_path, "two")] * 2)))
    assert "step 12/12" in said[0]
    assert "step" not in said[1]  # process 0 speaks for all
    configs = [small_run(tmp_path, *SAME, run=run) for run in ("two", "one")]
    with wide_everywhere():
        train(configs[1])
        two, one = (restore(config, 12) for config in configs)
    np.testing.assert_allclose(losses(tmp_path, "two"), losses(tmp_path, "one"), rtol=1e-6)
    with wide_everywhere():
        for name, value in leaves(two[0]).items():
            np.testing.assert_allclose(value, leaves(one[0])[name], rtol=1e-6, atol=1e-9, err_msg=name)
    assert two[1] == one[1]  # the position in the data


def test_another_configuration_is_refused_by_all(tmp_path):
    commands = [command(tmp_path, "run"), command(tmp_path, "run", "seed=3")]
    for text in ended(finish_job(tmp_path, start_job(tmp_path, commands)), 2):
        assert text.count("Error: Process 1 of 2 was given another configuration than process 0") == 1
        assert "Traceback" not in text
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("data.corpus=/nowhere", "Error: data.corpus"),
        pytest.param("parallel.fsdp=3", "Error: parallel.fsdp 3", marks=pytest.mark.soak),
    ],
)
def test_bad_input_is_told_by_all(tmp_path, override, said):
    found = finish_job(tmp_path, start_job(tmp_path, [command(tmp_path, "run", override)] * 2))
    for text in ended(found, 2):
        assert text.count(said) == 1


@pytest.mark.soak
def test_what_one_process_alone_is_told_ends_all(tmp_path):
    alone = """
import os, zaya_jax.train.loop as loop
from zaya_jax.errors import InputError
place = loop.Layout.place
def damaged(layout, batch, count=None, *more):
    if count and loop.jax.process_index() == 1:
        raise InputError("A document is damaged.")
    return place(layout, batch, count, *more)
loop.Layout.place = damaged
"""
    job = start_job(tmp_path, [command(tmp_path, "run")] * 2, code=alone)
    for text in ended(finish_job(tmp_path, job), 2):
        assert text.count("Error: A document is damaged.") == 1
        assert "Traceback" not in text
        assert "Check failure" not in text


def test_a_coordinator_that_cannot_be_reached_is_told_by_all(tmp_path):
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    job = start_job(tmp_path, [command(tmp_path, "run")] * 2, addresses=addresses, code=IMPATIENT)
    for address, text in zip(addresses, ended(finish_job(tmp_path, job), 2), strict=True):
        assert f"Error: The coordinator {address} was not reached by all processes within 4 s." in text
        assert "Traceback" not in text


def start_over_link(folder, *overrides, code=None):
    """A job whose process 1 reaches the coordinator over a link; returned when it has made two steps."""
    port = free_port()
    link = Link(port)
    addresses = [f"127.0.0.1:{port}", f"127.0.0.1:{link.port}"]
    job = start_job(folder, [command(folder, "run", *overrides)] * 2, addresses=addresses, code=code)
    metrics = folder / "run" / METRICS
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < 2:
        time.sleep(0.05)
        assert [process.poll() for process in job] == [None, None], finish_job(folder, job)
    return link, job


@pytest.mark.soak
def test_silence_ends_the_run_with_a_sentence(tmp_path):
    link, job = start_over_link(tmp_path, 'phases=[{"tokens": 128000}]', code=IMPATIENT)
    link.cut()
    found = ended(finish_job(tmp_path, job), 1)
    link.close()
    for other, text in zip((1, 0), found, strict=True):
        assert f"Stopped: Process {other} was not heard for 5 s." in text
        assert "Traceback" not in text


@pytest.mark.soak
def test_a_process_that_dies_ends_the_others(tmp_path):
    link, job = start_over_link(tmp_path, 'phases=[{"tokens": 128000}]', code=IMPATIENT)
    job[1].kill()
    (status, text), _ = finish_job(tmp_path, job)
    link.close()
    assert status == 1
    assert "Stopped: " in text
    assert "Traceback" not in text


@pytest.mark.soak
def test_a_cut_of_20_seconds_is_survived(tmp_path):
    link, job = start_over_link(
        tmp_path, 'phases=[{"tokens": 102400}]', "evaluation.every=1000", "checkpoint.every=1000"
    )
    link.cut()
    begun, before = time.monotonic(), len(losses(tmp_path, "run"))
    threading.Timer(20, link.mend).start()
    ended(finish_job(tmp_path, job))
    assert time.monotonic() - begun > 20
    assert before < len(losses(tmp_path, "run")) == 800
    link.close()


@pytest.mark.soak
def test_four_processes_train_the_tiny_model_as_one_does_and_fewer_go_on(tmp_path):
    overrides = ["train.compute_dtype=float64", "evaluation.every=20", "evaluation.batches=1", "evaluation.batch=4",
                 "checkpoint.every=10", "checkpoint.keep=10", "sample.tokens=1", f"data.cache_dir={tmp_path / 'cache'}",
                 'phases=[{"tokens": 40960, "schedule": {"warmup_tokens": 22528, "final": 0.02}}]']  # fmt: skip
    config = str(ROOT / "configs" / "tiny.yaml")

    def run(name, processes, *more):
        own = ["--config", config, *overrides, f"run_dir={tmp_path / name}", *more]
        ended(finish_job(tmp_path, start_job(tmp_path, [own] * processes), 3000))
        return np.array(losses(tmp_path, name))

    alone = run("one", 1)
    assert len(alone) == 20
    for processes in (2, 4):
        np.testing.assert_allclose(run(str(processes), processes), alone, rtol=1e-6)
    for processes in (2, 1):  # from what four have saved after step 10
        later = tmp_path / f"after{processes}"
        shutil.copytree(tmp_path / "4", later)
        shutil.rmtree(later / "checkpoints" / "20")
        np.testing.assert_allclose(run(later.name, processes), alone, rtol=1e-6)
        assert "Going on after step 10 of 20." in (tmp_path / "0.log").read_text(encoding="utf-8")
    with wide_everywhere():
        four, one = (load_config(config, [*overrides, f"run_dir={tmp_path / name}"]) for name in ("4", "one"))
        one_state = leaves(restore(one, 20)[0])
        for name, value in leaves(restore(four, 20)[0]).items():
            np.testing.assert_allclose(value, one_state[name], rtol=1e-6, atol=1e-9, err_msg=name)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("node1:1", None, None), "given together"),
        (("node1", 2, 0), "must be HOST:PORT"),
        (("node1:port", 2, 0), "must be HOST:PORT"),
        (("node1:99999", 2, 0), "must be HOST:PORT"),
        (("node1:1", 2, 2), "--process is 2 of --processes 2"),
        (("node1:1", 0, 0), "--process is 0 of --processes 0"),
    ],
)
def test_flags_that_cannot_be_are_refused(flags, said):
    with pytest.raises(InputError, match=said):
        join(*flags, join_seconds=1, silence_seconds=1)


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, None),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "16"}, "Slurm"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, None),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, "Open MPI"),
        (POD, "Kubernetes"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, None),  # a pod of its own
    ],
)
def test_launchers_are_known_by_what_they_set(environment, found):
    assert launcher(environment) == found


def test_a_pod_that_cannot_find_the_others_is_not_left_to_train_alone(monkeypatch):
    for name, value in POD.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=r"by the package kubernetes .*, or by --coordinator"):
        join(None, None, None, join_seconds=1, silence_seconds=1)


def test_alone_nothing_is_lost():
    assert not lost(RuntimeError("of another kind"))
    assert not lost(jax.errors.JaxRuntimeError("of one process"))
