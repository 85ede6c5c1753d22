import functools
import math

import pytest

from zaya_jax.config import load_config
from zaya_jax.errors import InputError
from zaya_jax.hardware.data_sheets import ASSUMPTIONS, HARDWARE, LINKS
from zaya_jax.lab.predict.dry_run.estimate import advice, estimate_phase, model_flops, simulated_programs
from zaya_jax.lab.predict.dry_run.memory import Activations, Memory
from zaya_jax.lab.predict.dry_run.traffic import seconds
from zaya_jax.model.arithmetic import training_flops_per_token

RELEASED = load_config("configs/zaya1_8b.yaml")
TINY = load_config("configs/tiny.yaml", ["train.batch.tokens=8192", "train.batch.micro_batch=1",
                                         "model.attention=gqa", "model.router=linear"])  # fmt: skip


def no_activations(*_):
    """In place of counting them, which takes a second; times do not depend on them."""
    return Activations(0, 0)


@pytest.mark.parametrize(("context", "total"), [(4096, 8.74e9), (32768, 15.8e9), (131072, 40.0e9)])
def test_operations_a_token_are_those_published(context, total):
    """docs/reference.md §1.1."""
    flops = model_flops(RELEASED.model, context)
    assert sum(flops.values()) == pytest.approx(total, rel=0.01)
    assert sum(flops.values()) == pytest.approx(training_flops_per_token(RELEASED.model, context), rel=1e-12)
    assert flops["head"] == pytest.approx(3 * 1.074e9, rel=0.001)
    assert flops["rest"] == pytest.approx(3 * 1.505e9, rel=0.001)


def test_the_estimate_of_the_released_model():
    estimate = estimate_phase(simulated_programs(RELEASED, 1024), 0, HARDWARE["mi300x"], no_activations)
    assert estimate.axes == {"data": 1024, "fsdp": 1, "expert": 1, "context": 1}
    assert (estimate.tokens, estimate.sequences, estimate.micro_batches) == (16_777_216, 4, 1)
    assert round(estimate.flops["newton_schulz"] / 1e12, 2) == 444.42  # docs/reference.md §3.1
    model = sum(estimate.flops.values()) - estimate.flops["newton_schulz"]
    assert model == pytest.approx(16_777_216 * 8.74e9, rel=0.01)
    # All devices orthogonalize the router's small matrices, which they do not divide.
    assert estimate.bounds["compute"] == pytest.approx(sum(estimate.flops.values()) / 1024 / 1307e12, rel=1e-3)
    assert estimate.bounds["network"] == pytest.approx(0.17, abs=0.01)  # 70 GB over the 8 adapters of a node
    # The layers hide theirs. The rest, most of it the embedding's, are 3.9 GB over xGMI at 70 % of 448 GB/s.
    assert estimate.seconds["exposed network"] == pytest.approx(0.014, abs=0.001)
    model = {name: count / 1024 / 1307e12 for name, count in estimate.flops.items()}
    layers = model["attention"] + model["rest"]  # remat: dots computes no matmul twice
    matmuls = layers / ASSUMPTIONS.kernel + (model["head"] + model["newton_schulz"]) / ASSUMPTIONS.matmul
    assert estimate.seconds["matmuls and kernels"] == pytest.approx(matmuls, rel=1e-3)
    assert estimate.seconds["kernel launches"] == pytest.approx(40 * 120 * 2e-6)
    assert estimate.step_seconds == sum(estimate.seconds.values())
    steps = math.ceil(8e12 / 16_777_216)
    assert estimate.steps == steps


def test_groups_of_devices_that_have_the_same_matrices_all_orthogonalize_them():
    """Three devices divide no matrix that eight have divided, and so 24 devices spend three times 8's FLOPs on them."""
    seconds_of = []
    for data in (1, 3):
        overrides = ["parallel.fsdp=8", f"phases.0.batch.tokens={data * 8 * 4 * 4096}"]
        programs = simulated_programs(load_config("configs/bench_8b.yaml", overrides), 8 * data)
        estimate = estimate_phase(programs, 0, HARDWARE["h200"], no_activations)
        model = sum(estimate.flops.values()) - estimate.flops["newton_schulz"]
        seconds_of.append(estimate.bounds["compute"] - model / (8 * data) / HARDWARE["h200"].peak)
    assert seconds_of[1] == pytest.approx(seconds_of[0], rel=1e-6)
    assert seconds_of[1] > 0.03


def test_several_micro_batches_gather_all_layers_before_the_first():
    config = load_config("configs/zaya1_8b.yaml", ["phases.pretrain_1.batch.micro_batch=1"])
    estimate = estimate_phase(simulated_programs(config, 1024), 0, HARDWARE["mi300x"], no_activations)
    assert estimate.micro_batches == 4
    # Nothing hides 17.7 GB of parameters; the layers of the last micro-batch hide the reduction of their gradients.
    assert estimate.seconds["exposed network"] == pytest.approx(0.065, abs=0.002)


def test_what_the_layers_cannot_hide_is_exposed():
    slow = HARDWARE["mi300x"]._replace(intra_node=44.8e9, link=6.4e9)
    estimate = estimate_phase(simulated_programs(RELEASED, 1024), 0, slow, no_activations)
    network = seconds(estimate.transfers, estimate.axes, slow, LINKS)
    assert estimate.step_seconds == pytest.approx(network)
    assert 0.8 * network < estimate.seconds["exposed network"] < network


def test_without_hardware_there_are_no_times():
    estimate = tiny_estimate()
    assert (estimate.bounds, estimate.seconds, estimate.step_seconds) == ({}, {}, None)
    assert estimate.micro_batches == 2


@pytest.mark.parametrize(("overrides", "devices", "named"), [
    (["parallel.fsdp=3"], 8, r"parallel\.fsdp 3 .* 8, the number of devices"), ([], 3, r"train\.batch .* 16 sequences"),
])  # fmt: skip
def test_what_cannot_be_laid_out_is_refused(overrides, devices, named):
    with pytest.raises(InputError, match=named):
        simulated_programs(load_config("configs/tiny.yaml", ["train.batch.tokens=8192", *overrides]), devices)


@functools.cache
def tiny_estimate():
    return estimate_phase(simulated_programs(TINY, 8), 0, None, no_activations)


def made(**changes):
    memory = Memory(int(10e9), int(10e9), int(20e9), int(50e9), int(40e9), int(5e9), int(20e9))
    return tiny_estimate()._replace(**{"memory": memory, "sequences": 2, "remat": "dots", **changes})


def test_advice_is_only_of_what_would_help():
    device = HARDWARE["h100"]
    cheap = ["train.batch.micro_batch below 2", "train.remat=full", "parallel.gradient_reduction=micro_batch"]
    spread = ["a larger parallel.fsdp", "a larger parallel.context", "more devices"]
    assert advice(made(), device) == cheap + spread
    assert advice(made(sequences=1, remat="full", reduce="micro_batch"), device) == spread
    alone = {"data": 1, "fsdp": 1, "expert": 1, "context": 1}
    assert advice(made(sequences=1, remat="full", axes=alone), device) == ["more devices"]
    assert advice(made(memory=made().memory._replace(update=int(70e9))), device) == ["more devices"]
