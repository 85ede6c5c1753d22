import contextlib

import chex
import numpy as np
import pytest

from tests.train_helpers import CONFIG, change, fast_jit, make_program, setup
from zaya_jax.config import BatchConfig
from zaya_jax.hardware.data_sheets import HARDWARE
from zaya_jax.machine import step as module
from zaya_jax.machine.step import describe_throughput, forward_backward, make_rows, random_tokens, throughput, time_step
from zaya_jax.machine.subprocesses import Passes
from zaya_jax.train.step import make_local_loss

SMALL = change(CONFIG, {"train.batch": BatchConfig(tokens=2 * CONFIG.data.context)})


@pytest.mark.soak
def test_a_pass_covers_every_token():
    tokens_bs = random_tokens(SMALL)
    assert tokens_bs.shape == (2, CONFIG.data.context + 1)
    step = forward_backward(SMALL, "float32", tokens_bs)
    loss = step()
    assert loss == step()
    state = setup().state
    plain = fast_jit(make_local_loss(make_program(SMALL)))(state.params, state.balance, make_rows(tokens_bs))[0]
    assert loss == pytest.approx(float(plain) / tokens_bs[:, 1:].size, rel=1e-4)


def test_each_dtype_is_timed_alone(monkeypatch, capsys):
    made = []
    monkeypatch.setattr(module, "run_in_subprocess", lambda *args: made.append(args) or contextlib.nullcontext(dict))
    monkeypatch.setattr(module, "interleave", lambda steps, repeats: {"step": Passes([2.0] * repeats, [])})
    result = time_step(SMALL, ("float32", "bfloat16"), 3)
    assert [(make, dtype) for make, _, dtype, _ in made] == [(forward_backward, dtype) for dtype in result["results"]]
    assert result["tokens"] == 64
    assert result["results"]["bfloat16"]["tokens_per_second"] == 32.0
    assert result["results"]["bfloat16"]["seconds"] == [2.0] * 3
    assert capsys.readouterr().out.count("32 tokens/s") == 2


def test_throughput_has_an_mfu_where_there_is_a_data_sheet():
    speed = throughput(10.0, 1000, 0.3 * HARDWARE["h200"].peak * 10, "NVIDIA H200")
    assert (speed["tokens_per_second"], speed["mfu"]) == (100.0, 0.3)
    assert describe_throughput(speed).endswith("TFLOP/s, MFU 30.0%")
    speed = throughput(10.0, 1000, 1e12, "cpu")
    assert (speed["tflops_per_second"], speed["mfu"]) == (0.1, None)
    assert "MFU" not in describe_throughput(speed)


def test_rows_are_documents_without_padding():
    rows = make_rows(np.arange(2 * 33).reshape(2, 33))
    assert rows["targets"][1, 0] == rows["tokens"][1, 0] + 1 == 34
    assert rows["positions"][1].tolist() == list(range(32))
    flag = rows.pop("loss_mask")
    assert flag.all()
    chex.assert_shape([flag, *rows.values()], (2, 32))
    chex.assert_type([flag, *rows.values()], [bool, *[np.int32] * 4])
