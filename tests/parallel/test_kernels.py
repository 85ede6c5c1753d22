import dataclasses

import jax
import pytest

from tests.train_helpers import CONFIG
from zaya_jax.config.table import Table
from zaya_jax.errors import InputError
from zaya_jax.ops import registry
from zaya_jax.ops.registry import KernelSelection
from zaya_jax.ops.target import Target, current_target
from zaya_jax.parallel import kernels as room
from zaya_jax.parallel.kernels import validated_kernels

GPU = Target("cuda", "NVIDIA H100", "sm_90")


@pytest.fixture(autouse=True)
def nothing_tried(monkeypatch):
    monkeypatch.setattr(registry, "_rejected", {})
    monkeypatch.setattr(registry, "_passed", {})


def test_on_a_cpu_nothing_is_chosen_tried_or_said(capsys):
    assert validated_kernels(CONFIG) == KernelSelection(current_target())
    assert capsys.readouterr().out == ""


def test_what_is_used_is_said_once(capsys, monkeypatch):
    monkeypatch.setattr(room, "current_target", lambda: GPU)
    run = dataclasses.replace(CONFIG, train=dataclasses.replace(CONFIG.train, compute_dtype="float64"))
    selection = validated_kernels(run)
    assert selection.chosen == {}
    first, second = capsys.readouterr().out.splitlines()
    assert second == str(selection)
    assert first.startswith("No kernels were measured on NVIDIA H100: the default ones run. To measure: ")


@pytest.mark.filterwarnings("ignore:The pallas kernel for residual_norm")
def test_what_is_wrong_on_one_process_is_left_out_on_all(monkeypatch, capsys):
    """And what takes its place is tried before all are of one mind."""
    rounds = []
    other = ["residual_norm", "pallas", "its error is 2, above the tolerance 0.001."]

    def all_gather(topic, value, seconds):
        rounds.append(value)
        return [value, [other]]

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(room, "all_gather", all_gather)
    monkeypatch.setattr(room, "broadcast", lambda value: value)
    monkeypatch.setattr(room, "current_target", lambda: GPU)
    monkeypatch.setattr(room, "validate_kernels", lambda selection, *_, **__: selection)
    selection = validated_kernels(CONFIG)
    assert rounds == [[], [other]]
    assert "residual_norm" not in selection.chosen
    assert "gram_polynomial" in selection.chosen
    assert f"No pallas kernel for residual_norm: {other[2]}" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:The pallas kernel for residual_norm")
@pytest.mark.parametrize("here", [True, False])
def test_a_pinned_kernel_that_is_wrong_on_one_process_ends_all(monkeypatch, here):
    reason = "its error is 2, above the tolerance 0.001."
    sent = []

    def all_gather(topic, value, seconds):
        sent.append(value)
        return [value, [] if here else [["residual_norm", "pallas", reason]]]

    def validate_kernels(selection, model, dtype, **_):
        if here:
            registry.reject(GPU, "residual_norm", "pallas", reason)
            registry.select_kernels(GPU, model, dtype, None, selection.pinned)
        return selection

    monkeypatch.setattr(room, "current_target", lambda: GPU)
    monkeypatch.setattr(room, "all_gather", all_gather)
    monkeypatch.setattr(room, "broadcast", lambda value: value)
    monkeypatch.setattr(room, "validate_kernels", validate_kernels)
    with pytest.raises(InputError, match=r"ops\.residual_norm=pallas cannot be used: its error is 2"):
        validated_kernels(dataclasses.replace(CONFIG, ops=Table({"residual_norm": "pallas"})))
    assert sent == [[["residual_norm", "pallas", reason]] if here else []]
