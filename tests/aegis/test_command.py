"""How the command changes between attempts: devices that divide the batch, and rows to skip."""

import dataclasses

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.train_helpers import CONFIG, small_run, write_run
from zaya_jax.aegis.training_command import TrainingCommand, _merged, fits, read_command
from zaya_jax.config import ParallelConfig, to_yaml
from zaya_jax.errors import InputError
from zaya_jax.run.folder import CONFIG as CONFIG_FILE
from zaya_jax.run.job_secret import VARIABLE

ARGV = ["python", "-m", "zaya_jax.main", "--config"]


def command(folder, *overrides, processes=1):
    return read_command([*ARGV, str(write_run(folder)), *overrides], processes, None)


def test_a_training_command_names_its_run_and_is_checked(tmp_path):
    assert command(tmp_path).run_dir == tmp_path / "run"
    with pytest.raises(InputError, match="seed"):
        command(tmp_path, "seed=-1")
    with pytest.raises(InputError, match="--run-dir is missing"):
        read_command(["sh", "-c", "true"], 1, None)
    with pytest.raises(InputError, match="Remove them from the command"):
        command(tmp_path, "--coordinator", "a:1", "--processes", "2", "--process", "0", processes=2)


@pytest.mark.parametrize("words", [
    "zaya train", "/opt/bin/zaya train", "python -m zaya_jax train", "python -m zaya_jax.main", "env X=1 zaya train",
    "python -mzaya_jax.main", "srun --ntasks 2 zaya train", "nice -n 5 python -X dev -m zaya_jax.main",
])  # fmt: skip
@pytest.mark.parametrize("flag", [[], ["--config"]])
def test_a_training_command_may_be_written_in_any_way(tmp_path, words, flag):
    argv = [*words.split(), *flag, str(write_run(tmp_path)), "seed=5"]
    read = read_command(argv, 1, None)
    assert (read.config.seed, read.run_dir, read.argv) == (5, tmp_path / "run", tuple(argv))


@pytest.mark.parametrize("words", ["zaya data describe", "python -m benchmarks train", "zaya_jax main", "train zaya"])
def test_another_command_needs_a_run_folder(tmp_path, words):
    with pytest.raises(InputError, match="--run-dir is missing"):
        read_command([*words.split(), str(write_run(tmp_path))], 1, None)
    assert read_command(words.split(), 1, str(tmp_path)).config is None


def test_processes_are_numbered_over_all_nodes(tmp_path):
    argv = [*ARGV, str(write_run(tmp_path))]
    job = read_command(argv, 2, None, nodes=3, coordinator="node0:8476", environment={"SLURM_NODEID": "1"})
    assert [flags[-6:] for flags, _ in job.processes("unused")] == [
        ["--coordinator", "node0:8476", "--processes", "6", "--process", str(index)] for index in (2, 3)
    ]
    assert job.with_fewer_devices(None) is None
    for node, coordinator in ((None, "a:1"), (3, "a:1"), (1, None)):
        with pytest.raises(InputError, match="--nodes 3 needs"):
            read_command(argv, 2, None, nodes=3, node=node, coordinator=coordinator, environment={})


def test_one_process_runs_the_command_as_it_is(tmp_path):
    one = command(tmp_path)
    assert one.processes("a:1") == [(list(one.argv), {})]


def test_several_processes_meet_and_have_a_device_each(tmp_path):
    two = command(tmp_path, processes=2).processes("a:1")
    assert [argv[-6:] for argv, _ in two] == [
        ["--coordinator", "a:1", "--processes", "2", "--process", str(index)] for index in range(2)
    ]
    secret = two[0][1][VARIABLE]
    assert [variables for _, variables in two] == [
        {"JAX_LOCAL_DEVICE_IDS": str(index), VARIABLE: secret} for index in range(2)
    ]
    assert secret != command(tmp_path, processes=2).processes("a:1")[0][1][VARIABLE]  # of the next attempt


def test_one_process_that_is_left_sees_its_device_alone(tmp_path):
    left = command(tmp_path, processes=2).with_fewer_devices(0)
    assert left.processes("a:1") == [(list(left.argv), {"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "1"})]


@pytest.mark.parametrize(
    ("batch", "devices", "lost", "expected"),
    [
        (64, 8, 3, (0, 1, 2, 4)),
        (48, 8, 3, (0, 1, 2, 4, 5, 6)),
        (48, 8, None, (0, 1, 2, 3, 4, 5)),
        (8, 2, 0, (1,)),
        (8, 1, 0, None),
    ],
)
def test_the_next_number_of_devices_divides_the_batch(tmp_path, batch, devices, lost, expected):
    config = small_run(tmp_path, f"train.batch.tokens={batch * 32}", "train.batch.micro_batch=1")
    fewer = TrainingCommand(tuple(ARGV), tmp_path, tuple(range(devices)), config=config).with_fewer_devices(lost)
    assert (fewer and fewer.devices) == expected


@given(st.integers(1, 64), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]), st.sampled_from([1, 2, 4]))
def test_a_number_of_devices_fits_if_each_gets_whole_micro_batches(devices, fsdp, context, micro_batch):
    batch = dataclasses.replace(CONFIG.train.batch, tokens=64 * 32, micro_batch=micro_batch)
    config = dataclasses.replace(CONFIG, parallel=ParallelConfig(fsdp=fsdp, context=context),
                                 train=dataclasses.replace(CONFIG.train, batch=batch))  # fmt: skip
    shards = devices / context
    rows = min(micro_batch, max(1, 64 // max(shards, 1)))  # a shard with fewer sequences has one micro-batch
    assert fits(config, devices) == (devices % (fsdp * context) == 0 and 64 % (rows * shards) == 0)


def test_rows_to_skip_are_those_of_the_configuration_of_the_run_and_of_the_supervisor(tmp_path):
    base = command(tmp_path, "data.skip_rows=[[3, 5]]")
    assert base.processes("") == [(list(base.argv), {})]
    skipping = dataclasses.replace(base, skipped_rows=((8, 12), (10, 14)))
    assert skipping.processes("")[0][0][-1] == "data.skip_rows=[[3, 5], [8, 14]]"
    recorded = small_run(tmp_path, "data.skip_rows=[[3, 5], [5, 6]]")
    base.run_dir.mkdir()
    (base.run_dir / CONFIG_FILE).write_text(to_yaml(recorded))
    argv = skipping.processes("")[0][0]
    assert argv[-1] == "data.skip_rows=[[3, 5], [5, 6], [8, 14]]"
    assert yaml.safe_load(argv[-1].partition("=")[2]) == [[3, 5], [5, 6], [8, 14]]


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9)), max_size=8))
def test_merged_ranges_cover_the_same_rows(ranges):
    merged = _merged([(first, first + size) for first, size in ranges])
    rows = [row for first, end in merged for row in range(first, end)]
    assert rows == sorted({row for first, size in ranges for row in range(first, first + size)})
