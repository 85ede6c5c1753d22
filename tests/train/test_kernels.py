import dataclasses

import jax
import pytest

from tests.train_helpers import CONFIG
from zaya_jax.ops.registry import OPERATIONS, KernelSelection
from zaya_jax.ops.target import Target, current_target
from zaya_jax.train import kernels as room
from zaya_jax.train.kernels import choose_kernels


def test_on_a_cpu_nothing_is_chosen_tried_or_said(capsys):
    assert choose_kernels(CONFIG, current_target()) == KernelSelection(current_target())
    assert capsys.readouterr().out == ""


@pytest.fixture
def all_right(monkeypatch):
    monkeypatch.setattr(room, "validate_kernels", lambda choice, *_: choice)


def test_what_is_used_is_said_once(all_right, capsys):
    run = dataclasses.replace(CONFIG, train=dataclasses.replace(CONFIG.train, compute_dtype="float64"))
    choice = choose_kernels(run, Target("cuda", "NVIDIA H200"))
    assert choice.kernels == []
    assert capsys.readouterr().out == f"{choice}\n"


def test_what_is_wrong_on_one_process_is_left_out_on_all(all_right, monkeypatch, capsys):
    others = {"symmetric": "it is 2 off, but may be 0.001."}
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(room, "all_gather", lambda topic, value, seconds: [value, others])
    choice = choose_kernels(CONFIG, Target("cuda", "NVIDIA H200"))
    assert choice.reasons["symmetric"] == "it is 2 off, but may be 0.001."
    assert "symmetric" in choice.target.without
    assert "Not symmetric: it is 2 off, but may be 0.001." in capsys.readouterr().out


def test_every_kernel_is_chosen_by_the_name_the_target_knows():
    target = Target("rocm", "gfx942", without=tuple(OPERATIONS))
    assert all(target.kernel(name) is None for name in OPERATIONS)
