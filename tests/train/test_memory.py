"""Too little memory is one sentence: what is needed and what there is, before compilation or when it runs out."""

import os
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import psutil
import pytest

from tests.config_helpers import changed
from tests.train_helpers import CONFIG, compile_once, leaves, setup, write_run
from zaya_jax.config import LoraConfig, ParallelConfig, PhaseConfig
from zaya_jax.errors import InputError, Reason, RunStopped
from zaya_jax.main import main
from zaya_jax.parallel.placement import device_bytes
from zaya_jax.run.host_memory import control_groups
from zaya_jax.train import compiled, fit, memory
from zaya_jax.train.memory import available_memory, check_compiled, check_memory, out_of_memory
from zaya_jax.train.program import make_programs


def test_an_allocation_that_fails_is_one_sentence():
    message = (r"^It ran out of memory: it requested (4e\+06|4,000,000) GB, and .* GB is available per device\. "
            r"Lower it\.$")  # fmt: skip
    with pytest.raises(RunStopped, match=message) as end, out_of_memory("It", "Lower it"):
        jax.block_until_ready(jax.jit(lambda: jnp.zeros((10**6, 10**9), jnp.int32) + jnp.arange(10**9))())
    assert end.value.reason is Reason.DEVICE_MEMORY


@pytest.mark.parametrize(("text", "requested"), [
    ("RESOURCE_EXHAUSTED: Out of memory allocating 33442016472 bytes.", ": it requested 33.4 GB, "),
    ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 3.25GiB.", ": it requested 3.25 GiB, "),
    ("RESOURCE_EXHAUSTED: Failed to allocate request for 7.50GiB (8053063680B)", ": it requested 7.50 GiB, "),
    ("INTERNAL: CUDA error: out of memory", ", "),
])  # fmt: skip
def test_each_way_to_say_it_is_understood(text, requested):
    with pytest.raises(RunStopped, match=f"^It ran out of memory{requested}"), out_of_memory("It", "Lower it"):
        raise jax.errors.JaxRuntimeError(text)


def test_another_error_is_left_alone():
    with pytest.raises(jax.errors.JaxRuntimeError), out_of_memory("It", "Lower it"):
        raise jax.errors.JaxRuntimeError("INTERNAL: a defect")
    sentence = r"^It ran out of memory, and .* GB is available"
    with pytest.raises(RunStopped, match=sentence) as end, out_of_memory("It", "Wait"):
        raise MemoryError
    assert end.value.reason is Reason.HOST_MEMORY


def test_a_compiled_step_that_needs_more_than_there_is_stops_before_it_runs(monkeypatch):
    compiled = jax.jit(lambda x: (x @ x) @ (x @ x.T)).lower(jax.ShapeDtypeStruct((1000, 1000), "float32")).compile()
    check_compiled(compiled, "phases.train")
    monkeypatch.setattr(memory, "available_memory", lambda: 4_000_000)
    with pytest.raises(RunStopped, match=r"^A step of phases\.train needs .* GB .*, but only 0\.004 GB is available\. "
                       r"Lower train\.batch\.micro_batch, set train\.remat to full, or raise "
                       r"parallel\.fsdp\.$"):  # fmt: skip
        check_compiled(compiled, "phases.train")


def test_a_gpu_reports_its_own_limit_and_a_cpu_what_the_host_leaves(monkeypatch):
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < available_memory() <= total + psutil.swap_memory().total
    for stats, expected in (({"bytes_limit": 7}, 7), (None, None), ({}, None)):
        device = SimpleNamespace(platform="gpu", memory_stats=lambda stats=stats: stats)
        monkeypatch.setattr(jax, "local_devices", lambda device=device: [device])
        assert available_memory() == expected


def test_the_limits_of_all_control_groups_count(tmp_path):
    own, root = tmp_path / "own", tmp_path / "cgroup"
    (root / "a" / "b").mkdir(parents=True)
    own.write_text("1:name=x:/y\n0::/a/b\n")
    assert control_groups(root, own) == []
    (root / "a" / "memory.max").write_text("1000\n")
    (root / "a" / "memory.stat").write_text("anon 300\nfile 600\n")
    (root / "a" / "b" / "memory.max").write_text("max\n")
    assert control_groups(root, own) == [700]
    (tmp_path / "memory.max").write_text("1\n")
    assert control_groups(root, own) == [700], "a limit outside of the hierarchy is none"
    assert control_groups(root, tmp_path / "missing") == []


def test_the_limits_of_control_groups_of_version_1_count(tmp_path):
    own, inner = tmp_path / "own", tmp_path / "memory" / "job" / "step"
    inner.mkdir(parents=True)
    own.write_text("9:cpu,cpuacct:/other\n4:hugetlb,memory:/job/step\n0::/\n")
    for folder, limit, used in ((inner, 900, 100), (inner.parent, 9223372036854771712, 700)):  # one without a limit
        (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
        (folder / "memory.stat").write_text(f"cache 600\nrss 1\ntotal_rss {used}\n")
    assert control_groups(tmp_path, own)[0] == 800
    (inner.parent / "memory.limit_in_bytes").write_text("1000\n")
    assert control_groups(tmp_path, own) == [800, 300]


def test_a_run_that_is_too_large_ends_with_one_sentence_before_anything_is_made(tmp_path, capsys):
    path = write_run(tmp_path)
    assert main(["--config", str(path), "evaluation.batch_size=2000000000"]) == 2
    output = capsys.readouterr().err
    assert output.startswith("Error: phases.train needs at least ")
    assert output.endswith("Lower evaluation.batch_size (2,000,000,000).\n")
    assert output.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_an_evaluation_that_runs_out_of_memory_stops_the_run(tmp_path, capsys, monkeypatch):
    compile_once(monkeypatch)

    def fail(*_, **__):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 33442016472 bytes.")

    monkeypatch.setattr(compiled.CompiledSteps, "evaluation", lambda *_: fail)
    # By the way: the warning about rows that no token uses is printed.
    monkeypatch.setattr(fit, "vocabulary_warning", lambda tokenizer, size: f"Warning: {tokenizer.vocab_size}, {size}")
    path = write_run(tmp_path)
    assert main(["--config", str(path)]) == 1
    *lines, output = capsys.readouterr().err.splitlines()
    assert "Warning: 300, 300" in lines
    assert output.startswith("Stopped: The evaluation ran out of memory: it requested 33.4 GB, ")
    assert output.endswith(" Lower evaluation.batch_size.")


def refusal(monkeypatch, changes, available):
    monkeypatch.setattr(memory, "available_memory", lambda: available)
    with pytest.raises(InputError) as caught:
        check_memory(make_programs(changed(CONFIG, changes)))
    return str(caught.value)


def test_the_parameters_gradients_and_state_of_a_run_are_counted(monkeypatch):
    state = setup().state
    stored = sum(x.nbytes for x in leaves(state).values())
    least = stored + sum(x.nbytes for x in leaves(state.params).values())
    message = refusal(monkeypatch, {"evaluation.batch_size": 1}, least - 1)
    assert message.startswith(f"phases.train needs at least {least / 1e9:.3g} GB of memory per device for parameters,")
    monkeypatch.setattr(memory, "available_memory", lambda: least)
    check_memory(make_programs(changed(CONFIG, {"evaluation.batch_size": 1})))


@pytest.mark.parametrize(("changes", "remedy"), [
    ({"evaluation.batch_size": 10**6}, "Lower evaluation.batch_size (1,000,000)."),
    ({"train.batch.tokens": 2**26, "train.batch.micro_batch": None}, "Lower train.batch.micro_batch, the number"),
    ({"phases": (PhaseConfig(2**26), PhaseConfig(2**26, "wide", batch=changed(CONFIG.train.batch, {
        "tokens": 2**26, "micro_batch": None})))}, "Lower phases.wide.batch.micro_batch, the number"),
    ({"init_from": "x", "lora": LoraConfig(2, 1.0), "evaluation.batch_size": 10**6},
     "Lower evaluation.batch_size (1,000,000)."),
])  # fmt: skip
def test_the_key_to_lower_is_named(monkeypatch, changes, remedy):
    message = refusal(monkeypatch, changes, 10**8)
    assert message.startswith("phases.")
    assert " of memory per device for " in message
    assert "but only 0.1 GB is available. " in message
    assert remedy in message


def test_a_device_that_does_not_tell_its_memory_is_not_judged(monkeypatch):
    monkeypatch.setattr(memory, "available_memory", lambda: None)
    check_memory(make_programs(changed(CONFIG, {"evaluation.batch_size": 10**9})))


def test_a_step_takes_more_than_the_bound():
    """Whatever the compiler does, so that nothing is refused that would fit."""
    state = setup().program.abstract_state
    needed = device_bytes(state) + device_bytes(state.params)
    needs = setup().compiled.memory_analysis()
    used = needs.argument_size_in_bytes + needs.temp_size_in_bytes + needs.output_size_in_bytes
    assert needed < used - needs.alias_size_in_bytes
    rows = CONFIG.train.batch.micro_batch or 1
    kept = rows * CONFIG.data.context * CONFIG.model.num_groups * CONFIG.model.hidden_size * 4
    assert kept < needs.temp_size_in_bytes
    assert jax.device_count() == 1
    assert CONFIG.parallel == ParallelConfig()
