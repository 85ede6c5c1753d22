"""Several real processes on one machine are one job."""

import errno
import itertools
import shutil
import signal
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import assert_close
from tests.job.processes_helpers import Link, finish_job, free_port, random_state, start_job, wide_everywhere
from tests.train_helpers import ROOT, leaves, restore, small_run, write_run
from zaya_jax.checkpoint.restore import read_checkpoint
from zaya_jax.config import load_config
from zaya_jax.errors import InputError, Reason, RunStopped, exit_message, exit_reason
from zaya_jax.job import multihost
from zaya_jax.job.multihost import all_gather, broadcast, check_alike, primary_first
from zaya_jax.ops.kernel_table import own_table, parse_table
from zaya_jax.parallel.kernels import TABLE
from zaya_jax.run.checkpoints import CHECKPOINTS
from zaya_jax.run.folder import METRICS
from zaya_jax.run.metrics import read_rows
from zaya_jax.train import initialization
from zaya_jax.train.fit import run_training

SAME = ["train.compute_dtype=float64", "train.batch.micro_batch=1", "evaluation.batch_size=4", "sample.tokens=1"]
IMPATIENT = """
import zaya_jax.hardware.presets as p
p.PRESETS["cpu"] = p.PRESETS["cpu"]._replace(join_seconds=4, peer_timeout=5)
"""


def command(folder, run, *overrides):
    return ["--config", str(write_run(folder, run)), *SAME, *overrides]


def losses(folder, run):
    return [[row["step"], row["loss"], row["grad_norm"]] for row in read_rows(folder / run / METRICS)]


def ended(outcomes, status=0):
    assert [code for code, _ in outcomes] == [status] * len(outcomes), "\n\n".join(text for _, text in outcomes)
    return [text for _, text in outcomes]


# What is there of a model and an optimizer that compiles soonest: the devices of one process test the rest.
SHORT = ["model.attention=gqa", "model.router=linear", "model.residual_scaling=false", "optimizer.matrices=adamw",
         "sample.tokens=0", 'phases=[{"tokens": 768, "schedule": {"warmup_tokens": 256}}]', "evaluation.every=6",
         "checkpoint.every=4"]  # fmt: skip
# Joins once, and compiles the step in process 0 before process 1 does. The last command line differs in its seed.
SEVERAL = """
import os
import threading
import jax
import psutil
from tests.job.processes_helpers import random_state
from zaya_jax.main import main
from zaya_jax.job import multihost
from zaya_jax.run.options import parse_training
from zaya_jax.train import fit, initialization
from zaya_jax.train.program import PhaseProgram

options, hits, compile_step = parse_training(sys.argv[1:]), [], PhaseProgram.compile
peers = multihost.join((options.coordinator, options.processes, options.process), 60, 60.0)
print("listens at", [each.laddr for each in psutil.Process().net_connections("inet") if each.status == "LISTEN"])
multihost.join = lambda *_: peers
os.environ["XDG_CACHE_HOME"] = f"{options.config}.cache{options.process}"
validated = fit.validated_kernels

def say_kernels(*arguments):
    kernels = validated(*arguments)
    print("kernels", kernels.digest, flush=True)
    return kernels

def count(event, **_):
    if event.endswith("cache_hits"):
        hits.append(threading.current_thread())

def compile_in_turn(*arguments):
    if options.process:
        multihost.all_gather("turn", None, 300)
    before = hits.count(threading.current_thread())
    step = compile_step(*arguments)
    print("from the cache:", hits.count(threading.current_thread()) - before, flush=True)
    if not options.process:
        multihost.all_gather("turn", None, 300)
    return step

jax.monitoring.register_event_listener(count)
PhaseProgram.compile, initialization.init_state = compile_in_turn, random_state
fit.validated_kernels = say_kernels
print("status", main(sys.argv[1:]))
print("--", flush=True)
sys.argv += [f"run_dir={options.config}.bad", f"seed={options.process}"]
"""


# Each process has its own table of measured kernels.
TABLES = [parse_table({"device": "cpu", "operations": {}, "of": process}, "cpu", "") for process in range(2)]


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """The folder of a job of two processes; what each has said of what works, and of what does not."""
    folder = tmp_path_factory.mktemp("job #1 of a?b")  # a name that libraries would split
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(folder / "compiled"))
        arguments = command(folder, "two", *SHORT)
        for process, table in enumerate(TABLES):
            patch.setenv("XDG_CACHE_HOME", f"{arguments[1]}.cache{process}")
            own_table("cpu").parent.mkdir(parents=True)
            own_table("cpu").write_text(table.text)
        started = start_job(folder, [arguments] * 2, code=SEVERAL)
    return folder, [text.rsplit("--\n", 1) for text in ended(finish_job(folder, started), 2)]


def test_processes_train_as_one_does_and_leave_a_checkpoint_for_one(job):
    folder, texts = job
    first, second = (worked for worked, _ in texts)
    assert "step 6/6" in first
    assert "status 0" in first
    assert "status 0" in second
    assert "_proxy" not in first + second
    assert "step" not in second  # process 0 speaks for all
    two, one = (small_run(folder, *SAME, *SHORT, run=run) for run in ("two", "one"))
    with wide_everywhere(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(initialization, "init_state", random_state)
        state = run_training(one).state
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
        together, alone = (read_checkpoint(Path(run.run_dir) / CHECKPOINTS / "6", lambda _: abstract)
                           for run in (two, one))  # fmt: skip
        assert_close(leaves(together.state), leaves(alone.state), 1e-6, least=1e-3)
    np.testing.assert_allclose(losses(folder, "two"), losses(folder, "one"), rtol=1e-6)
    assert together.manifest.metadata["data"] == alone.manifest.metadata["data"]  # the position


def test_process_1_compiles_nothing_that_process_0_has_compiled(job):
    for (text, _), hits in zip(job[1], (0, 1), strict=True):
        assert f"from the cache: {hits}\n" in text


def test_the_kernels_that_process_0_measured_are_those_of_all(job):
    assert all(f"kernels {TABLES[0].digest}\n" in text for text, _ in job[1])
    assert (job[0] / "two" / TABLE).read_text() == TABLES[0].text


def test_no_process_listens_at_a_port_once_all_are_connected(job):  # until libraries make theirs
    assert all("listens at []\n" in text for text, _ in job[1])


def test_bad_input_is_told_by_all(job):
    folder, texts = job
    for _, text in texts:
        assert text.count("Error: Process 1 of 2 has a different configuration") == 1
        assert "Traceback" not in text
    assert not (folder / "two.yaml.bad").exists()


@pytest.mark.soak
def test_adapters_are_begun_by_two_processes_and_finished_by_one(tmp_path):
    base = small_run(tmp_path, *SAME, 'phases=[{"tokens": 256}]', "sample.tokens=0", run="base")
    with wide_everywhere():
        run_training(base)
    adapters = ["lora.rank=2", "lora.alpha=4", f"init_from={base.run_dir}",
                "checkpoint.every=1", 'phases=[{"tokens": 256}]', "optimizer.adamw.weight_decay=0",
                "sample.tokens=0"]  # fmt: skip
    split = command(tmp_path, "adapters", *adapters, "parallel.fsdp=4")
    assert "step 2/2" in ended(finish_job(tmp_path, start_job(tmp_path, [split] * 2)))[0]
    rows = losses(tmp_path, "adapters")
    shutil.rmtree(tmp_path / "adapters" / "checkpoints" / "2")
    with wide_everywhere():
        run_training(small_run(tmp_path, *SAME, *adapters, run="adapters"))
    again = losses(tmp_path, "adapters")
    assert again[:1] == rows[:1]
    np.testing.assert_allclose(again, rows, rtol=1e-6)


@pytest.mark.soak
def test_what_one_process_alone_is_told_ends_all(tmp_path):
    alone = """
import jax
from zaya_jax.errors import InputError
from zaya_jax.train.trainer import Trainer
step = Trainer.step
def damaged(trainer):
    if jax.process_index() == 1:
        raise InputError("A document is damaged.")
    step(trainer)
Trainer.step = damaged
"""
    job = start_job(tmp_path, [command(tmp_path, "run")] * 2, code=alone)
    for text in ended(finish_job(tmp_path, job), 2):
        assert text.count("Error: A document is damaged.") == 1
        assert "Traceback" not in text
        assert "Check failure" not in text


def start_and_wait(folder, begun, *overrides, code=None, link=None):
    """A job of two, returned when `begun`; process 1 reaches the coordinator over a `link` where there is one."""
    addresses = None if link is None else [f"127.0.0.1:{port}" for port in (link.to, link.port)]
    job = start_job(folder, [command(folder, "run", *overrides)] * 2, addresses=addresses, code=code)
    while not begun(folder):
        time.sleep(0.02)
        assert [process.poll() for process in job] == [None, None], finish_job(folder, job)
    return job


def has_two_rows(folder):
    metrics = folder / "run" / METRICS
    return metrics.exists() and metrics.read_bytes().count(b"\n") >= 2


SPEAKING = """
import jax
from zaya_jax.train.program import PhaseProgram
join, compile_step = jax.distributed.initialize, PhaseProgram.compile
jax.distributed.initialize = lambda *a, **k: (join(*a, **k), print("joined", flush=True))
PhaseProgram.compile = lambda *a: (print("compiling", flush=True), compile_step(*a))[1]
"""


def says(word):
    return lambda folder: all(word in (folder / f"{index}.log").read_text(encoding="utf-8") for index in range(2))


@pytest.mark.soak
def test_a_link_that_is_cut_ends_the_run_with_a_sentence(tmp_path):
    link = Link(free_port())
    job = start_and_wait(tmp_path, has_two_rows, 'phases=[{"tokens": 128000}]', code=IMPATIENT, link=link)
    link.cut()
    texts = ended(finish_job(tmp_path, job), 1)
    link.close()
    for other, text in zip((1, 0), texts, strict=True):
        assert f"Stopped: Process {other} on " in text
        assert "sent no heartbeat for 5 s" in text
        assert "Traceback" not in text


@pytest.mark.soak
@pytest.mark.parametrize(
    "begun", [says("joined"), says("compiling"), has_two_rows], ids=["joined", "compiling", "rows"]
)
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(("sent", "ending"), [("SIGKILL", "was lost"), ("SIGSTOP", "sent no heartbeat for 5 s")])
def test_a_process_that_is_killed_or_stopped_ends_the_other_with_its_name(tmp_path, begun, victim, sent, ending):
    job = start_and_wait(tmp_path, begun, 'phases=[{"tokens": 128000}]', code=IMPATIENT + SPEAKING)
    job[victim].send_signal(signal.Signals[sent])
    assert job[1 - victim].wait(60) == 1
    job[victim].kill()
    text = finish_job(tmp_path, job)[1 - victim][1]
    messages = [line for line in text.splitlines() if line.startswith(f"Stopped: Process {victim} on ")]
    assert len(messages) == 1, text
    assert ending in messages[0]
    for noise in ("Traceback", "Check failure", "gloo", "DEADLINE", "UNAVAILABLE"):
        assert noise not in text


@pytest.mark.soak
def test_a_cut_of_20_seconds_is_survived(tmp_path):
    link = Link(free_port())
    job = start_and_wait(tmp_path, has_two_rows, 'phases=[{"tokens": 102400}]', "evaluation.every=1000",
                         "checkpoint.every=1000", link=link)  # fmt: skip
    link.cut()
    before, mending = len(losses(tmp_path, "run")), threading.Timer(20, link.mend)
    mending.start()
    ended(finish_job(tmp_path, job))
    assert mending.finished.is_set()  # no process ended before
    assert before < len(losses(tmp_path, "run")) == 800
    link.close()


@pytest.mark.soak
def test_four_processes_train_the_tiny_model_as_one_does_and_fewer_go_on(tmp_path):
    overrides = ["train.compute_dtype=float64", "evaluation.every=20", "evaluation.batches=1",
                 "evaluation.batch_size=4", "checkpoint.every=10", "checkpoint.keep=10", "sample.tokens=1",
                 f"data.cache_dir={tmp_path / 'cache'}",
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
        assert "Resuming after step 10 of 20." in (tmp_path / "0.log").read_text(encoding="utf-8")
    with wide_everywhere():
        four, alone_config = (load_config(config, [*overrides, f"run_dir={tmp_path / name}"]) for name in ("4", "one"))
        assert_close(leaves(restore(four, 20)[0]), leaves(restore(alone_config, 20)[0]), 1e-4, least=1e-3)


# --- messages --------------------------------------------------------------------------------------------------


class Store(dict):
    """The coordinator's store, for threads that stand for processes."""

    def __init__(self):
        self.changed = threading.Condition()

    def key_value_set(self, key, text):
        with self.changed:
            assert key not in self
            self[key] = text
            self.changed.notify_all()

    def blocking_key_value_get(self, key, milliseconds):
        with self.changed:
            if not self.changed.wait_for(lambda: key in self, milliseconds / 1000):
                raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED")
            return self[key]


def in_processes(count, act):
    """What `act(index)` gives or raises in each of so many processes of one job."""
    here = threading.local()

    def run(index):
        here.index, here.turns = index, defaultdict(itertools.count)
        try:
            return act(index)
        except Exception as error:
            return error

    turns = type("Turns", (), {"__getitem__": lambda _, topic: here.turns[topic]})()
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(count) as pool:
        store = Store()
        patch.setattr(jax, "process_count", lambda: count)
        patch.setattr(jax, "process_index", lambda: here.index)
        patch.setattr(multihost, "_turns", turns)
        patch.setattr(multihost, "key_value_store", lambda: store)
        return list(pool.map(run, range(count)))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(), values, max_size=3), max_leaves=5,
)  # fmt: skip


@given(st.lists(JSON, min_size=1, max_size=4))
def test_messages_arrive_as_they_were_sent(values):
    def act(index):
        sent = broadcast(values[index]), all_gather("a", values[index], 10), broadcast(index)
        return *sent, all_gather("a", index, 10), all_gather("b", None, 10)

    count = len(values)
    expected = values[0], values, 0, list(range(count)), [None] * count
    assert repr(in_processes(count, act)) == repr([expected] * count)  # which tells True, 1 and 1.0 apart


def test_one_that_says_nothing_is_named():
    first, second = in_processes(2, lambda index: index or all_gather("a", 0, 0.01))
    assert (str(first), second) == ("Process 1 did not answer within 0.01 s.", 1)


def test_a_tuple_arrives_as_a_list_in_every_process():
    for count in (1, 2):
        sent = in_processes(count, lambda index: (broadcast((1, ())), all_gather("a", (index,), 10)))
        assert sent == [([1, []], [[index] for index in range(count)])] * count


FULL_DISK = OSError(errno.ENOSPC, "No space left on device", "run/config.yaml")


@pytest.mark.parametrize(
    "error",
    [
        InputError("It is bad: mend it."),
        OSError(),
        FULL_DISK,
        RunStopped("It is: over."),
        KeyError("x"),
        RunStopped("It is broken.", Reason.NO_CHECKPOINT),
        InputError("It is early.", Reason.PEERS_MISSING),
    ],
)
def test_what_process_0_cannot_do_the_others_do_not_try(error):
    def act(index):
        if index:
            pytest.fail("process 0 has failed")
        raise error

    first, second = in_processes(2, lambda index: primary_first(lambda: act(index)))
    assert first is error
    assert exit_message(second) == exit_message(error)
    assert exit_reason(second) == exit_reason(error)


@pytest.mark.soak
def test_a_disk_that_is_full_for_process_0_is_bad_input_to_none(tmp_path):
    full = """
import errno
from zaya_jax.train import fit
def full(config):
    raise OSError(errno.ENOSPC, "No space left on device", "corpus")
fit.open_sources = full
"""
    job = start_job(tmp_path, [command(tmp_path, "run")] * 2, code=full)
    for text in ended(finish_job(tmp_path, job), 1):
        assert text.count("Stopped: corpus: No space left on device. Free some space") == 1
        assert "Traceback" not in text


def test_process_0_goes_first_and_differing_configurations_are_named():
    done = []
    assert in_processes(3, lambda index: primary_first(lambda: done.append(index) or index)) == [0, 1, 2]
    assert done[0] == 0
    refused = in_processes(3, lambda index: check_alike("abb"[index]))
    assert {str(error) for error in refused} == {str(refused[0])}
    assert str(refused[0]).startswith("Processes 1, 2 of 3 have a different configuration")
