import contextlib
import dataclasses
import json
import os
import re
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.train_helpers import CONFIG, ROOT, change, fast_jit
from zaya_jax.bench import __main__ as command
from zaya_jax.bench import whole_step as bench
from zaya_jax.bench.whole_step import (
    bench_whole_step,
    check_memory,
    default_whole_config,
    memory_limit,
    our_figures,
    peak_memory,
    time_ours,
    timed,
)
from zaya_jax.config import BatchConfig, LoraConfig, load_config
from zaya_jax.config.stages import stages
from zaya_jax.errors import InputError
from zaya_jax.hardware.data_sheets import HARDWARE
from zaya_jax.hardware.presets import describe_preset
from zaya_jax.model.arithmetic import total_parameters, training_flops_per_token
from zaya_jax.train.state import init_state, make_blueprint
from zaya_jax.train.step import make_local_loss

CONFIG = change(CONFIG, {"train.batch": BatchConfig(tokens=4 * CONFIG.data.context, micro=2)})
FLOPS = 128 * training_flops_per_token(CONFIG.model, 32)
SECONDS = {"step": [9.0, 10.0, 40.0], "optimizer": [2.0] * 3, "without_newton_schulz": [0.5] * 3}
OURS = {"device": "NVIDIA H200", "platform": "cuda", "micro_batch": 2, "remat": "dots", "seconds": SECONDS,
        "losses": [5.0, 4.0], "peak_bytes": 100e9, "peak_bytes_by": "the device"}  # fmt: skip
PEER = {"micro_batch": 4, "checkpointing": True, "seconds": {"step": [40.0] * 3}, "losses": [5.0, 4.5],
        "peak_bytes": None}  # fmt: skip


# --- what is measured ------------------------------------------------------------------------------------------


@pytest.mark.soak
def test_our_step_is_the_training_step_on_every_token_and_the_optimizer_is_timed_beside_it():
    tokens = np.random.default_rng(0).integers(0, CONFIG.model.vocab_size, (4, CONFIG.data.context + 1))
    found = time_ours(CONFIG, tokens, 2)
    blueprint = make_blueprint(CONFIG)
    state = fast_jit(lambda: init_state(CONFIG, blueprint))()
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "segment_ids": np.ones_like(tokens[:, 1:]),
             "positions": np.broadcast_to(np.arange(tokens.shape[1] - 1), tokens[:, 1:].shape),
             "loss_mask": np.ones(tokens[:, 1:].shape, bool)}  # fmt: skip
    plain = float(fast_jit(make_local_loss(CONFIG, blueprint))(state.params, state.balance, batch)[0])
    assert found["losses"][0] == pytest.approx(plain / tokens[:, 1:].size, rel=1e-4)
    assert len(found["losses"]) == 3  # one to warm up
    assert found["losses"][2] < found["losses"][1] < found["losses"][0]
    assert {name: len(each) for name, each in found["seconds"].items()} == dict.fromkeys(SECONDS, 2)
    assert (found["device"], found["platform"], found["micro_batch"], found["remat"]) == ("cpu", "cpu", 2, "none")
    assert found["peak_bytes"] > 3 * 4 * total_parameters(CONFIG.model)  # masters, moments, gradients
    assert found["peak_bytes_by"] == "the compiled program"


class Program(SimpleNamespace):
    """What a compiled program is to the benchmark."""

    def __call__(self, *arguments):
        return self.run(*arguments)

    def memory_analysis(self):
        return SimpleNamespace(argument_size_in_bytes=30, output_size_in_bytes=20, alias_size_in_bytes=15,
                               temp_size_in_bytes=7)  # fmt: skip


def test_what_a_program_returns_goes_into_the_next_call(monkeypatch):
    seen = []

    def step(state, batch, base):
        assert base == {}
        seen.append((float(state.params["w"]), batch["tokens"].shape, batch["targets"][0, 0, 0].item()))
        assert batch["positions"][1, 1].tolist() == list(range(32))
        return SimpleNamespace(params={"w": state.params["w"] + 1}, opt_state=0), {"loss": np.float32(len(seen))}

    def move(params, opt_state, gradients):
        assert float(gradients["w"]) == 3
        seen.append((float(params["w"]), opt_state))
        return {"w": params["w"] + 10}, opt_state + 1

    programs = bench.Programs(*(Program(run=run) for run in (step, move, move)))
    monkeypatch.setattr(bench, "compile_programs", lambda _: programs)
    monkeypatch.setattr(bench, "begin", lambda *_: SimpleNamespace(params={"w": np.zeros(())}))
    found = time_ours(CONFIG, np.arange(4 * 33).reshape(4, 33), 2)
    assert [jax.config.read(f"jax_{platform}_visible_devices") for platform in ("cuda", "rocm")] == ["0", "0"]
    assert seen[:3] == [(n, (2, 2, 32), 1) for n in range(3)]
    assert seen[3:] == [(3 + 10 * n, n) for n in range(6)]
    assert found["losses"] == [1.0, 2.0, 3.0]


def test_memory_is_what_the_device_counts_or_the_program_takes():
    counts, silent = (SimpleNamespace(memory_stats=lambda found=found: found) for found in (
        {"peak_bytes_in_use": 77, "bytes_limit": 100}, None))  # fmt: skip
    assert peak_memory(counts, Program()) == {"peak_bytes": 77, "peak_bytes_by": "the device"}
    assert peak_memory(silent, Program()) == {"peak_bytes": 42, "peak_bytes_by": "the compiled program"}
    assert memory_limit(counts) == 100
    assert memory_limit(silent) > 1e8


def test_the_step_to_warm_up_is_not_counted(monkeypatch):
    clock = iter([0.0, 100.0, 200.0, 201.0, 300.0, 302.0])
    monkeypatch.setattr(bench.time, "perf_counter", lambda: next(clock))
    calls = []
    assert timed(lambda: calls.append(1), 2) == [1.0, 2.0]
    assert len(calls) == 3


def test_the_optimizers_share_is_scaled_and_newton_schulz_is_time_but_no_operations():
    tokens, peak = 1000, HARDWARE["h200"].peak
    ours = our_figures(OURS, tokens, 0.3 * peak * 10, "NVIDIA H200")
    assert ours["tokens_per_second"] == 100.0
    assert ours["mfu"] == 0.3
    assert (ours["optimizer_share"], ours["newton_schulz_share"]) == (0.2, 0.15)
    eighth = ours["with_part_of_the_optimizer"]["1/8"]
    assert eighth["tokens_per_second"] == pytest.approx(1000 / 8.25, abs=0.1)
    assert eighth["mfu"] == pytest.approx(0.3 * 10 / 8.25, abs=1e-4)
    assert eighth["optimizer_share"] == pytest.approx(0.25 / 8.25, abs=1e-4)
    assert ours["with_part_of_the_optimizer"]["1/1024"]["tokens_per_second"] == pytest.approx(1000 / 8.002, abs=0.1)


def test_where_the_data_sheet_is_not_there_no_mfu_is_claimed():
    ours = our_figures(OURS, 1000, 1e12, "cpu")
    assert ours["mfu"] is None
    assert ours["tflops_per_second"] == 0.1


@given(layers=st.integers(1, 60), fixed=st.integers(0, 10**10), each=st.integers(1, 10**10),
       limit=st.integers(1, 10**12), pattern=st.sampled_from([("full",), ("full", "sliding")]))  # fmt: skip
def test_the_depth_that_is_named_is_the_deepest_that_fits(layers, fixed, each, limit, pattern):
    model = dataclasses.replace(CONFIG.model, num_layers=layers * len(pattern), layer_pattern=pattern, sliding_window=8)
    config = dataclasses.replace(CONFIG, model=model)

    def needs(config):
        return fixed + each * config.model.num_layers

    if needs(config) <= limit:
        check_memory(config, needs(config), limit, lambda _: pytest.fail("it fits"))
        return
    with pytest.raises(InputError) as told:
        check_memory(config, needs(config), limit, needs)
    assert "\n" not in str(told.value)
    found = re.search(r"model\.num_layers=(\d+) would fit\.", str(told.value))
    period = len(config.model.period)
    if found is None:
        assert layers == 1 or fixed + each * period > limit
        return
    fitting = int(found[1])
    assert fitting % period == 0
    assert fixed + each * fitting <= limit * (1 + 1e-9)
    assert fixed + each * (fitting + period) > limit * (1 - 1e-9)


def test_a_step_that_does_not_fit_is_told_before_anything_is_allocated(monkeypatch):
    monkeypatch.setattr(bench, "compile_programs", lambda config: SimpleNamespace(bytes=1000 * config.model.num_layers))
    monkeypatch.setattr(bench, "memory_limit", lambda _: 1500)
    monkeypatch.setattr(bench, "begin", lambda *_: pytest.fail("allocated"))
    with pytest.raises(InputError, match=r"model\.num_layers=1 would fit"):
        time_ours(CONFIG, np.zeros((4, 33), int), 1)


# --- what is asked and told ------------------------------------------------------------------------------------


@pytest.fixture
def sides(monkeypatch):
    """Both sides without torch or compilation; what they were asked, and the environment that ours had."""
    asked = {}

    def ours(config, tokens, repeats):
        asked["ours"] = config, tokens, repeats
        asked["environment"] = dict(os.environ)
        return {**OURS}

    def peer(config, tokens, device, threads, repeats):
        asked["peer"] = config, tokens, repeats
        asked["device"] = device
        return {**PEER}

    monkeypatch.setattr(bench, "run_in_subprocess", lambda _, work, *rest: contextlib.nullcontext(lambda: work(*rest)))
    monkeypatch.setattr(bench, "time_ours", ours)
    monkeypatch.setattr(bench, "time_peer", peer)
    monkeypatch.setattr(bench, "check_peer", lambda: None)
    return asked


def test_the_result_says_what_was_measured_and_where(sides, tmp_path, capsys):
    path = tmp_path / "step.json"
    result = bench_whole_step(CONFIG, 3, str(path))
    assert json.loads(path.read_text()) == result
    assert result["size"] == f"{total_parameters(CONFIG.model):,} parameters in 2 layers, float32, 4 x 32 tokens a step"
    assert result["hardware"]["device"] == "NVIDIA H200"
    assert "processes used or wanted" in result["hardware"]["load"]
    assert result["results"]["ours"]["tokens_per_second"] == 12.8
    assert result["results"]["peer"]["tokens_per_second"] == 3.2
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" ")[0] for line in lines] == ["ours:", "the", "with", "with", "transformers:"]
    assert "100.0 GB at most by the device" in lines[0]
    assert "20.0% of the step, Newton–Schulz alone 15.0%" in lines[1]
    assert all("MFU" in line for line in (lines[0], *lines[2:5]))


@pytest.mark.parametrize(("matrices", "dtype", "comparable"), [
    ("adamw", "float32", True), ("muon", "float32", False), ("adamw", "bfloat16", False),
])  # fmt: skip
def test_a_ratio_is_given_only_of_the_same_optimizer_and_precision(sides, capsys, matrices, dtype, comparable):
    config = change(CONFIG, {"optimizer.matrices": matrices, "train.compute_dtype": dtype})
    results = bench_whole_step(config, 1, None)["results"]
    assert results.get("ratio") == (4.0 if comparable else None)
    assert ("ratio" in capsys.readouterr().out) == comparable
    assert sides


def test_both_sides_get_the_same_rows_and_ours_the_environment_of_training(sides):
    config = change(CONFIG, {"preset": "h200"})
    before = dict(os.environ)
    bench_whole_step(config, 3, None)
    (asked, ours, repeats), (_, peer, _) = sides["ours"], sides["peer"]
    assert asked is config
    assert repeats == 3
    assert ours.shape == (4, 33)
    assert np.array_equal(ours[:, :-1], peer)
    assert sides["device"] == "cuda"
    assert describe_preset(sides["environment"]).startswith("Preset h200: --xla")
    assert os.environ == before


def test_what_ours_took_is_kept_where_the_peer_does_not_fit(sides, monkeypatch, tmp_path):
    def too_large(*_):
        raise InputError("It does not fit.")

    monkeypatch.setattr(bench, "time_peer", too_large)
    with pytest.raises(InputError, match="does not fit"):
        bench_whole_step(CONFIG, 1, str(tmp_path / "step.json"))
    written = json.loads((tmp_path / "step.json").read_text())["results"]
    assert written["ours"]["tokens_per_second"] == 12.8
    assert "peer" not in written


@pytest.mark.parametrize(("changes", "match"), [
    ({"lora": LoraConfig(rank=2, alpha=2.0)}, "lora"),
    ({"train.compute_dtype": "float64"}, r"train\.compute_dtype is 'float64'"),
])  # fmt: skip
def test_what_the_peer_cannot_do_is_refused(sides, changes, match):
    with pytest.raises(InputError, match=match):
        bench_whole_step(change(CONFIG, changes), 1, None)
    assert not sides


def test_the_command_takes_a_configuration_or_the_default(sides, monkeypatch):
    tiny = ["--config", str(ROOT / "configs" / "tiny.yaml"), "train.batch.tokens=1024"]
    monkeypatch.setattr(sys, "argv", ["bench", "step", "--whole"])
    assert command.main(["step", "--whole", "--repeats", "2", *tiny]) == 0
    assert stages(sides["ours"][0])[0].sequences == 2
    assert command.main(["step", "--whole"]) == 0
    assert sides["ours"][0] == default_whole_config()
    default_whole_config().check()


@pytest.mark.parametrize(("arguments", "match"), [
    (["--dtype", "float32"], "--dtype is of a pass"),
    (["--repeats", "0"], "repeats"),
    (["--output", "/no/such/folder/out.json"], "/no/such/folder"),
])  # fmt: skip
def test_what_cannot_be_measured_or_written_is_told_before_measuring(sides, capsys, arguments, match):
    assert command.main(["step", "--whole", *arguments]) == 2
    assert match in capsys.readouterr().err
    assert not sides


def test_a_missing_peer_is_told_before_measuring(monkeypatch, capsys):
    monkeypatch.setattr(bench, "run_in_subprocess", lambda *_: pytest.fail("measured"))
    monkeypatch.setitem(sys.modules, "torch", None)
    assert command.main(["step", "--whole"]) == 2
    assert "needs PyTorch and transformers" in capsys.readouterr().err


def test_the_configuration_for_a_gpu_has_the_8bs_layers_and_what_is_asked_of_the_step():
    config, released = (load_config(ROOT / "configs" / name) for name in ("bench_8b.yaml", "zaya1_8b.yaml"))
    assert dataclasses.replace(config.model, num_layers=40) == released.model
    assert config.model.num_layers == 24
    assert config.optimizer == released.optimizer
    assert config.matrices == "muon"
    first = stages(config)[0]
    assert (first.tokens, first.context, first.steps) == (262_144, 4096, 100)
    assert config.train.compute_dtype == "bfloat16"
