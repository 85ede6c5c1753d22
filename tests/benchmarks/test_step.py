"""A pass and a whole step against `transformers`: what each side does, what is concluded, what does not fit."""

import contextlib
import dataclasses
import json
import os
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from benchmarks import __main__ as command
from benchmarks import peer, train_step
from benchmarks import step as bench
from benchmarks.peer import peer_step, time_peer
from benchmarks.step import (
    bench_step,
    bench_whole_step,
    check_memory,
    default_config,
    our_figures,
    time_ours,
)
from tests.lab.helpers import Program
from tests.train_helpers import CONFIG, MODEL, ROOT, change, fast_jit, make_program
from zaya_jax.config import BatchConfig, LoraConfig, load_config
from zaya_jax.config.stages import stages
from zaya_jax.errors import InputError
from zaya_jax.hardware.data_sheets import HARDWARE
from zaya_jax.hardware.environment import describe_preset
from zaya_jax.lab.measure import timing
from zaya_jax.lab.measure import training_steps as step_module
from zaya_jax.lab.measure.training_steps import forward_backward, make_rows, random_tokens
from zaya_jax.model.arithmetic import total_parameters
from zaya_jax.train.state import init_state
from zaya_jax.train.step import make_local_loss

CONFIG = change(CONFIG, {"train.batch": BatchConfig(tokens=4 * CONFIG.data.context, micro_batch=2)})
TINY = ["--config", str(ROOT / "configs" / "tiny.yaml"), "train.batch.tokens=1024"]
SECONDS = {"step": [9.0, 10.0, 40.0], "optimizer": [2.0] * 3, "without_newton_schulz": [0.5] * 3}
OURS = {"device": "NVIDIA H200", "platform": "cuda", "micro_batch": 2, "remat": "dots", "seconds": SECONDS,
        "losses": [5.0, 4.0], "peak_bytes": 100e9, "peak_bytes_by": "the device"}  # fmt: skip
PEER = {"micro_batch": 4, "checkpointing": True, "seconds": {"step": [40.0] * 3}, "losses": [5.0, 4.5],
        "peak_bytes": None}  # fmt: skip


@pytest.mark.parametrize("arguments", [["step"], ["step", "--whole"]])
@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_a_missing_peer_is_told_with_the_command_that_installs_it(monkeypatch, capsys, arguments, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    assert command.main(arguments) == 2
    assert "pip install -e '.[parity]'" in capsys.readouterr().err


# --- a pass ----------------------------------------------------------------------------------------------------------


def test_both_sides_get_the_same_tokens_and_the_result_has_their_ratio(monkeypatch, tmp_path, capsys):
    """Neither torch nor compilation: ours takes one second a pass, the peer two."""
    made, now = {}, [0.0]

    def run(make, *arguments):
        made[make] = arguments

        def step():
            now[0] += 1.0 if make is forward_backward else 2.0

        return contextlib.nullcontext(step)

    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now[0], sleep=lambda _: None))
    monkeypatch.setattr(timing, "run_in_subprocess", run)
    monkeypatch.setattr(bench, "require_peer", lambda: None)
    path = tmp_path / "step.json"
    assert command.main(["step", "--repeats", "2", "--dtype", "bfloat16", "--output", str(path), *TINY]) == 0
    config, dtype, tokens = made[forward_backward]
    model, peer_dtype, peer_tokens, device, threads = made[peer_step]
    assert model is config.model
    assert (dtype, peer_dtype, device) == ("bfloat16", "bfloat16", "cpu")
    assert threads > 0
    assert np.array_equal(tokens[:, :-1], peer_tokens)
    result = json.loads(path.read_text())
    assert result["size"] == f"{total_parameters(config.model):,} parameters, batch 2 x 512"
    assert result["hardware"]["device"] == "cpu"
    assert result["results"] == {"bfloat16": {
        "tokens_per_second": {"ours": 1024.0, "peer": 512.0}, "ratio": 2.0,
        "seconds": {"ours": [1.0] * 2, "peer": [2.0] * 2}}}  # fmt: skip
    assert capsys.readouterr().out.endswith("2.00× as fast\n")
    assert list(bench_step(CONFIG, ["float32", "bfloat16"], 1)["results"]) == ["float32", "bfloat16"]


def test_the_defaults_are_of_the_size_that_the_benchmark_names():
    for config, sequences in ((default_config(), 4), (default_config(16, 4), 16)):
        config.check()
        assert round(total_parameters(config.model) / 1e6, 2) == 52.75
        first = stages(config)[0]
        assert (first.sequences, first.context) == (sequences, 512)


# --- the peer --------------------------------------------------------------------------------------------------------


class Device:
    """A device, a model and an optimizer in one: what fits it, and how long a pass takes."""

    def __init__(self, monkeypatch, fits, seconds):
        self.fits, self.seconds, self.again, self.moved, self.now, self.left = fits, seconds, None, False, 0.0, True
        monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def fastest(self):
        torch, tokens = SimpleNamespace(OutOfMemoryError=MemoryError), np.zeros((8, 4))
        return peer._fastest(torch, self, tokens, self.one_pass, self.move, lambda: None)

    def one_pass(self, rows, of):
        if not self.fits(self.again, len(rows), self.moved):
            raise MemoryError
        assert of == len(rows)
        self.now += self.seconds(self.again, len(rows))

    def move(self):
        self.moved = True

    def activation_checkpointing_enable(self):
        self.again = True

    def activation_checkpointing_disable(self):
        self.again = False

    def zero_grad(self, set_to_none):
        self.left = not set_to_none


def test_training_takes_the_fastest_pass_that_fits_beside_the_moments(monkeypatch):
    def seconds(again, rows):
        return (1 + rows) * (1.3 if again else 1)

    roomy = Device(monkeypatch, lambda *_: True, seconds)
    assert roomy.fastest() == (False, 8)
    assert not roomy.left
    assert Device(monkeypatch, lambda again, rows, moved: again or rows < 2, seconds).fastest() == (True, 8)
    assert Device(monkeypatch, lambda again, rows, moved: rows < (8 if again else 4), seconds).fastest() == (False, 2)


@pytest.mark.parametrize("fits", [lambda again, rows, moved: False, lambda again, rows, moved: not moved])
def test_a_model_that_does_not_fit_is_told_in_a_sentence(monkeypatch, fits):
    with pytest.raises(InputError, match="do not fit in this device's memory"):
        Device(monkeypatch, fits, lambda *_: 1.0).fastest()


@pytest.mark.parity
def test_the_peer_trains_on_all_rows_whatever_it_takes_at_a_time(monkeypatch):
    tokens = np.random.default_rng(0).integers(0, MODEL.vocab_size, (8, 32))
    still = change(CONFIG, {"optimizer.adamw.learning_rate": 1e-12})
    whole = peer_step(MODEL, "float32", tokens, "cpu", 1)()
    for rows, again in ((2, True), (8, False)):
        monkeypatch.setattr(peer, "_fastest", lambda *_, chosen=(again, rows): chosen)
        found = time_peer(still, tokens, "cpu", 1, 2)
        assert found["losses"] == pytest.approx([whole] * 3, abs=2e-4)
        assert len(found["seconds"]["step"]) == 2
        assert (found["micro_batch"], found["checkpointing"], found["peak_bytes"]) == (rows, again, None)
    losses = time_peer(CONFIG, tokens, "cpu", 1, 2)["losses"]
    assert losses[2] < losses[1] < losses[0]


@pytest.mark.parity
def test_the_peer_trains_in_bf16_with_the_setting_that_it_chooses():
    config = change(CONFIG, {"train.compute_dtype": "bfloat16"})
    found = time_peer(config, np.random.default_rng(0).integers(0, MODEL.vocab_size, (4, 32)), "cpu", 1, 1)
    assert found["micro_batch"] in (1, 2, 4)
    assert found["losses"][1] < found["losses"][0]


# --- our whole step --------------------------------------------------------------------------------------------------


@pytest.mark.soak
def test_our_step_is_the_training_step_on_every_token_and_the_optimizer_is_timed_beside_it():
    tokens = random_tokens(CONFIG)
    measured = time_ours(CONFIG, tokens, 2)
    program = make_program(CONFIG)
    state = fast_jit(lambda: init_state(program))()
    plain = float(fast_jit(make_local_loss(program))(state.params, state.balance, make_rows(tokens))[0])
    assert measured["losses"][0] == pytest.approx(plain / tokens[:, 1:].size, rel=1e-4)
    assert len(measured["losses"]) == 3  # one to warm up
    assert measured["losses"][2] < measured["losses"][1] < measured["losses"][0]
    assert {name: len(each) for name, each in measured["seconds"].items()} == dict.fromkeys(SECONDS, 2)
    assert [measured[key] for key in ("device", "platform", "micro_batch", "remat")] == ["cpu", "cpu", 2, "none"]
    assert measured["peak_bytes"] > 3 * 4 * total_parameters(CONFIG.model)  # masters, moments, gradients
    assert measured["peak_bytes_by"] == "the compiled program"


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

    names = ("step", "optimizer", "without_newton_schulz")
    parts = {name: Program(run=run) for name, run in zip(names, (step, move, move), strict=True)}
    monkeypatch.setattr(bench, "compile_parts", lambda _: parts)
    monkeypatch.setattr(step_module, "initialize", lambda *_: SimpleNamespace(params={"w": np.zeros(())}))
    measured = time_ours(CONFIG, np.arange(4 * 33).reshape(4, 33), 2)
    assert [jax.config.read(f"jax_{platform}_visible_devices") for platform in ("cuda", "rocm")] == ["0", "0"]
    assert seen[:3] == [(n, (2, 2, 32), 1) for n in range(3)]
    assert seen[3:] == [(3 + 10 * n, n) for n in range(6)]
    assert measured["losses"] == [1.0, 2.0, 3.0]


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


@pytest.mark.parametrize("estimate", [1, 10])  # it may be off by any factor
def test_a_step_that_does_not_fit_is_told_with_a_depth_that_does_before_anything_is_allocated(estimate, monkeypatch):
    def needs(config, _devices=1):
        return estimate * 1000 * config.model.num_layers

    monkeypatch.setattr(bench, "compile_parts", lambda programs: {"step": needs(programs.config)})
    monkeypatch.setattr(bench, "peak_bytes", int)
    monkeypatch.setattr(bench, "program_memory", int)
    monkeypatch.setattr(bench, "available_memory", lambda: 1500 * estimate)
    monkeypatch.setattr(bench, "time_train_steps", lambda *_: pytest.fail("allocated"))
    for module in (bench, train_step):
        monkeypatch.setattr(module, "estimated_bytes", lambda config, _: 1000 * config.model.num_layers)
    with pytest.raises(InputError, match=r"model\.num_layers=1 and train\.batch\.micro_batch=2, which should fit"):
        time_ours(CONFIG, np.zeros((4, 33), int), 1)
    monkeypatch.setattr(bench, "available_memory", lambda: 2000 * estimate)
    check_memory(CONFIG, needs(CONFIG))


# --- both sides ------------------------------------------------------------------------------------------------------


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
    monkeypatch.setattr(bench, "require_peer", lambda: None)
    return asked


def test_a_peer_that_cannot_be_imported_is_named_before_anything_is_timed(tmp_path, monkeypatch):
    for name, content in (("torch", ""), ("transformers", "import a_package_that_is_missing")):
        (tmp_path / f"{name}.py").write_text(content, encoding="utf-8")
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(bench, "time_ours", lambda *_: pytest.fail("timed"))
    with pytest.raises(InputError, match=r"cannot be imported: No module named 'a_package_that_is_missing'\. Install"):
        bench_whole_step(CONFIG, 1, None)


def test_the_result_says_what_was_measured_and_where(sides, tmp_path, capsys):
    path = tmp_path / "step.json"
    result = bench_whole_step(CONFIG, 3, str(path))
    assert json.loads(path.read_text()) == result
    assert result["size"] == f"{total_parameters(CONFIG.model):,} parameters in 2 layers, float32, 4 x 32 tokens a step"
    assert result["hardware"]["device"] == "NVIDIA H200"
    assert "load average" in result["hardware"]["load"]
    assert result["results"]["ours"]["tokens_per_second"] == 12.8
    assert result["results"]["peer"]["tokens_per_second"] == 3.2
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" ")[0] for line in lines] == ["zaya_jax:", "the", "if", "if", "transformers:"]
    assert "peak 100.0 GB (measured by the device)" in lines[0]
    assert "20.0% of the step, 15.0% in Newton–Schulz" in lines[1]
    assert all("MFU" in line for line in (lines[0], *lines[2:5]))


@pytest.mark.parametrize(("matrices", "dtype", "comparable"), [
    ("adamw", "float32", True), ("muon", "float32", False), ("adamw", "bfloat16", False),
])  # fmt: skip
def test_a_ratio_is_given_only_of_the_same_optimizer_and_precision(sides, capsys, matrices, dtype, comparable):
    config = change(CONFIG, {"optimizer.matrices": matrices, "train.compute_dtype": dtype})
    results = bench_whole_step(config, 1, None)["results"]
    assert results.get("ratio") == (4.0 if comparable else None)
    assert ("as fast" in capsys.readouterr().out) == comparable
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


def test_the_command_takes_a_configuration_or_the_default(sides):
    assert command.main(["step", "--whole", "--repeats", "2", *TINY]) == 0
    assert stages(sides["ours"][0])[0].sequences == 2
    assert command.main(["step", "--whole"]) == 0
    assert sides["ours"][0] == default_config(16, 4)


def test_the_configuration_for_a_gpu_has_the_8bs_layers_and_what_is_asked_of_the_step():
    config, released = (load_config(ROOT / "configs" / name) for name in ("bench_8b.yaml", "zaya1_8b.yaml"))
    assert dataclasses.replace(config.model, num_layers=40) == released.model
    assert config.model.num_layers == 24
    assert config.optimizer == released.optimizer
    assert config.matrices == "muon"
    first = stages(config)[0]
    assert (first.tokens, first.context, first.steps) == (262_144, 4096, 100)
    assert config.train.compute_dtype == "bfloat16"
