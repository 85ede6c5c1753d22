import contextlib
import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from tests.train_helpers import CONFIG, ROOT, change, fast_jit, setup
from zaya_jax.bench import __main__ as command
from zaya_jax.bench import step as bench
from zaya_jax.bench.step import bench_step, default_config, our_step
from zaya_jax.config import BatchConfig
from zaya_jax.config.stages import stages
from zaya_jax.machine import subprocesses
from zaya_jax.model.arithmetic import total_parameters
from zaya_jax.train.step import make_local_loss

CONFIG = change(CONFIG, {"train.batch": BatchConfig(tokens=2 * CONFIG.data.context)})


@pytest.fixture
def tokens():
    return np.random.default_rng(0).integers(0, CONFIG.model.vocab_size, (2, CONFIG.data.context + 1))


@pytest.mark.soak
def test_our_step_is_a_pass_over_every_token(tokens):
    loss = our_step(CONFIG, "float32", tokens)
    first = loss()
    assert first == loss()
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "segment_ids": np.ones_like(tokens[:, 1:]),
             "positions": np.broadcast_to(np.arange(tokens.shape[1] - 1), tokens[:, 1:].shape),
             "loss_mask": np.ones(tokens[:, 1:].shape, bool)}  # fmt: skip
    state = setup().state
    plain = fast_jit(make_local_loss(CONFIG, setup().blueprint))(state.params, state.balance, batch)[0]
    assert first == pytest.approx(float(plain) / tokens[:, 1:].size, rel=1e-4)


def test_the_dtype_is_the_one_asked_for(monkeypatch, tokens):
    seen = []
    monkeypatch.setattr(bench, "make_local_loss", lambda config, _: seen.append(config.train.compute_dtype) or len)
    monkeypatch.setattr(bench, "init_state", lambda *_: np.zeros(1))
    our_step(CONFIG, "bfloat16", tokens)
    assert seen == ["bfloat16"]


def in_this_process(make, *arguments):
    return contextlib.nullcontext(make(*arguments))


@pytest.fixture
def peers(monkeypatch):
    """Both sides without torch or compilation: ours takes one second a pass, the peer two."""
    made, now = [], [0.0]

    def make(side, seconds):
        def step():
            now[0] += seconds
            return 1.0

        def maker(*arguments):
            made.append((side, *arguments))
            return step

        return maker

    monkeypatch.setattr(subprocesses, "time", SimpleNamespace(perf_counter=lambda: now[0], sleep=lambda _: None))
    monkeypatch.setattr(bench, "run_in_subprocess", in_this_process)
    monkeypatch.setattr(bench, "our_step", make("ours", 1.0))
    monkeypatch.setattr(bench, "peer_step", make("peer", 2.0))
    return made


def test_the_result_says_what_was_measured_and_where(peers, tmp_path, capsys):
    path = tmp_path / "step.json"
    results = bench_step(CONFIG, ["float32", "bfloat16"], 3, str(path))
    assert json.loads(path.read_text()) == results
    assert results["size"] == f"{total_parameters(CONFIG.model):,} parameters, batch 2 x 32"
    assert results["versions"].keys() == {"python", "zaya-jax", "jax", "jaxlib", "flax", "torch", "transformers"}
    assert results["hardware"].keys() == {"machine", "cpu", "cpus", "device"}
    assert results["command"].startswith("python -m zaya_jax.bench")
    assert results["results"] == {
        dtype: {
            "tokens_per_second": {"ours": 64.0, "peer": 32.0},
            "ratio": 2.0,
            "seconds": {"ours": [1.0] * 3, "peer": [2.0] * 3},
        }
        for dtype in ("float32", "bfloat16")
    }
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["float32", "bfloat16"]
    assert all(line.endswith("ratio 2.00") for line in lines)


def test_both_sides_get_the_same_tokens_but_the_last(peers):
    bench_step(CONFIG, ["float32"], 1, None)
    (_, ours_config, ours_dtype, ours_tokens), (_, peer_model, peer_dtype, peer_tokens, device, threads) = peers
    assert ours_config is CONFIG
    assert peer_model is CONFIG.model
    assert ours_dtype == peer_dtype == "float32"
    assert np.array_equal(ours_tokens[:, :-1], peer_tokens)
    assert (device, threads > 0) == ("cpu", True)


def test_the_default_is_the_size_that_the_benchmark_names():
    config = default_config()
    config.check()
    assert round(total_parameters(config.model) / 1e6, 2) == 52.75
    first = stages(config)[0]
    assert (first.sequences, first.context) == (4, 512)


def test_the_command_takes_a_configuration(peers, tmp_path, monkeypatch):
    arguments = ["step", "--repeats", "2", "--dtype", "bfloat16", "--output", str(tmp_path / "out.json"),
                 "--config", str(ROOT / "configs" / "tiny.yaml"), "train.batch.tokens=1024"]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["bench", *arguments])
    assert command.main(arguments) == 0
    result = json.loads((tmp_path / "out.json").read_text())
    assert list(result["results"]) == ["bfloat16"]
    assert result["command"] == " ".join(["python -m zaya_jax.bench", *arguments])
    assert peers[0][1].model.vocab_size == 4096
    assert stages(peers[0][1])[0].sequences == 2


def test_the_command_tells_a_missing_peer_in_a_sentence(monkeypatch, capsys):
    monkeypatch.setattr(bench, "run_in_subprocess", in_this_process)
    monkeypatch.setattr(bench, "our_step", lambda *_: None)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert command.main(["step", "--dtype", "float32"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("Error: The peer needs PyTorch and transformers")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--repeats", "0"], "repeats"),
        (["--output", "/no/such/folder/out.json"], "/no/such/folder"),
        (["--output", "/tmp"], "'/tmp'"),
        (["train.batch.tokens=16"], "train.batch.tokens=16 overrides a configuration, but none is given"),
    ],
)
def test_what_cannot_be_measured_or_written_is_told_before_measuring(peers, capsys, arguments, match):
    assert command.main(["step", "--dtype", "float32", *arguments]) == 2
    assert match in capsys.readouterr().err
    assert not peers
