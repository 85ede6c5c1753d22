from types import SimpleNamespace

import chex
import numpy as np
import pytest

from tests.lab.helpers import Program
from tests.train_helpers import CONFIG, change, fast_jit, make_program, setup
from zaya_jax.config import BatchConfig, SourceConfig, Table
from zaya_jax.config.stages import stages
from zaya_jax.hardware.data_sheets import HARDWARE
from zaya_jax.lab.measure import training_steps as module
from zaya_jax.lab.measure.training_steps import (
    describe_throughput,
    forward_backward,
    make_rows,
    peak_memory,
    random_tokens,
    throughput,
    time_train_steps,
)
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


def test_memory_is_what_the_device_counts_or_the_program_takes():
    counts, silent = (SimpleNamespace(memory_stats=lambda found=found: found) for found in (
        {"peak_bytes_in_use": 77}, None))  # fmt: skip
    assert peak_memory(counts, Program()) == {"peak_bytes": 77, "peak_bytes_by": "the device"}
    assert peak_memory(silent, Program()) == {"peak_bytes": 42, "peak_bytes_by": "the compiled program"}


@pytest.mark.parametrize("sources", [(), ("web", "code")])
def test_a_batch_has_what_the_compiled_step_takes(monkeypatch, sources):
    config = change(SMALL, {"data.sources": Table({name: SourceConfig(name) for name in sources})})
    program, stage = make_program(config), stages(config)[0]
    _, expected, _ = program.trace(stage).args_info[0]
    seen = []

    def step(state, batch, base):
        seen.append({name: (rows.shape, rows.dtype) for name, rows in batch.items()})
        assert base == {}
        return state + 1, {"loss": np.float32(state)}

    monkeypatch.setattr(module, "initialize", lambda _: 0)
    seconds, losses, state = time_train_steps(program, step, stage, random_tokens(config), 2)
    assert len(seconds) == 2
    assert (losses, state) == ([0.0, 1.0, 2.0], 3)
    assert seen == [{name: (rows.shape, rows.dtype) for name, rows in expected.items()}] * 3


def test_throughput_has_an_mfu_where_there_is_a_data_sheet():
    speed = throughput(10.0, 1000, 0.3 * HARDWARE["h200"].peak * 10, "NVIDIA H200")
    assert (speed["tokens_per_second"], speed["mfu"]) == (100.0, 0.3)
    assert describe_throughput(speed).endswith("TFLOP/s, MFU 30.0%")
    two = throughput(10.0, 1000, 0.6 * HARDWARE["h200"].peak * 10, "NVIDIA H200", 2)
    assert (two["tokens_per_second"], two["mfu"]) == (100.0, 0.3)
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
