"""Bytes on the wire, against those of the compiled step and against figures worked by hand."""

import dataclasses
import math
from collections import Counter

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.hlo_helpers import collectives, compiled_step
from tests.parallel_helpers import LAYOUTS, WIDE
from tests.train_helpers import on_devices
from zaya_jax.config import BatchConfig, ParallelConfig, load_config
from zaya_jax.hardware.data_sheets import HARDWARE
from zaya_jax.lab.predict.dry_run import memory
from zaya_jax.lab.predict.dry_run.estimate import estimate_phase, simulated_programs
from zaya_jax.lab.predict.dry_run.traffic import Transfer, _muon, group_devices, seconds
from zaya_jax.model.tree import shapes
from zaya_jax.parallel.mesh import AXES, make_mesh

QUICK = ["ring_zigzag4"]
REST = ["fsdp", "data", "micro_batch", "expert4", "all_gather_zigzag4", "gqa ring_zigzag4"]


def layout_config(name):
    """One micro-batch in fp32, which a CPU's collectives leave as it is; "gqa LAYOUT" is without CCA."""
    attention, _, layout = name.rpartition(" ")
    model = dataclasses.replace(WIDE.model, attention=attention or "cca")
    train = dataclasses.replace(WIDE.train, compute_dtype="float32", remat="full", batch=BatchConfig(tokens=16 * 32))
    return dataclasses.replace(WIDE, model=model, parallel=LAYOUTS[layout], train=train)


def sent_by(names):
    """For each layout, the bytes that a device sends by kind of collective, counted in the compiled step."""
    bytes_by_layout = {}
    for name in names:
        config = layout_config(name)
        sent, sizes = Counter(), make_mesh(config.parallel).shape
        for call in collectives(compiled_step(config), sizes):
            sent[call.kind] += call.sent * call.times
        bytes_by_layout[name] = dict(sent)
    return bytes_by_layout


def estimated(name):
    """The transfers of a layout, as the dry run has them."""
    return estimate_phase(simulated_programs(layout_config(name), 8), 0, None).transfers


def ours(name):
    """Bytes by kind of `estimated`, gathers and scatters together as some transfers are both."""
    sent = Counter()
    for _, kind, _, size, *_ in estimated(name):
        sent[kind if kind in ("all-to-all", "collective-permute", "all-reduce") else "gathered"] += size
    return sent


@pytest.mark.soak
def test_bytes_are_those_of_the_compiled_step():
    check(QUICK)


@pytest.mark.soak
def test_bytes_of_more_layouts_are_those_of_the_compiled_step():
    check(REST)


def check(names):
    for name, compiled in on_devices(8, "tests.lab.dry_run.test_traffic:sent_by", names).items():
        theirs, mine = Counter(compiled), ours(name)
        gathered = theirs["all-gather"] + theirs["reduce-scatter"]
        assert theirs["all-to-all"] == pytest.approx(mine["all-to-all"], rel=1e-9), name
        # Beside what is counted, integers go with it: which expert, which document.
        assert mine["gathered"] <= gathered <= 1.01 * mine["gathered"], name
        moved = theirs["collective-permute"]
        assert mine["collective-permute"] <= moved <= 1.04 * mine["collective-permute"], name
        # Of each leaf that is split the norms of gradient and update, twice where experts lie apart; loss and tokens of
        # the batch, and tokens of each class: four bytes each, over at most eight devices.
        config = layout_config(name)
        norms = sum(2 * (bool(leaf.over) + bool(leaf.own + leaf.experts_over))
                    for leaf in simulated_programs(config, 8)[0].placement.leaves.values())  # fmt: skip
        numbers = norms + 2 + config.model.num_layers * (config.model.num_experts + 1)
        assert mine["all-reduce"] <= theirs["all-reduce"] <= mine["all-reduce"] + 2 * 4 * 7 / 8 * numbers, name


@pytest.fixture(autouse=True)
def no_residuals(monkeypatch):
    """What a backward pass keeps takes seconds to count, and nothing of it is sent."""
    monkeypatch.setattr(memory, "residual_bytes", lambda *_: 0)


def test_only_attention_with_convolutions_has_halos():
    with_halos, without = ({transfer.what for transfer in estimated(name)} for name in ("ring_zigzag4", REST[-1]))
    assert "halos" in with_halos - without


def by_what(phase, parallel=None, overrides=()):
    config = load_config("configs/zaya1_8b.yaml", list(overrides))
    if parallel is not None:
        config = dataclasses.replace(config, phases=(dataclasses.replace(config.phases[phase], parallel=parallel),))
    sent = Counter()
    for transfer in estimate_phase(simulated_programs(config, 1024), phase, None).transfers:
        sent[transfer.what] += transfer.bytes
    return sent


def test_zero1_of_the_released_model_gathers_bf16_and_scatters_fp32_once_a_step():
    sent = by_what(0, overrides=["phases.pretrain_1.batch.micro_batch=1"])
    small = sent["gradients of replicated parameters"] / 8 * 1024 / 1023  # parameters that 1,024 does not split
    split = 8_840_488_784 + 256 - small
    assert sent["gradients"] == pytest.approx(4 * split * 1023 / 1024, rel=1e-6)
    assert sent["parameters"] == pytest.approx(sent["gradients"] / 2, rel=1e-3)  # some vectors compute in fp32


def test_layers_gather_for_both_passes_and_hide_what_they_move_in_a_single_micro_batch():
    program = simulated_programs(load_config("configs/zaya1_8b.yaml"), 1024)
    transfers = estimate_phase(program, 0, None).transfers
    hidden = {transfer.what: transfer.bytes for transfer in transfers if transfer.hidden}
    sizes, leaves = shapes(program[0].model), program[0].placement.leaves
    experts = sum(math.prod(shape) for name, shape in sizes.items() if leaves[name].gathered_in_layers)
    assert hidden["parameters"] == pytest.approx(4 * experts * 1023 / 1024)  # bf16 twice
    assert hidden["gradients"] == pytest.approx(hidden["parameters"], rel=0.03)  # fp32 once, attention's as well
    exposed = sum(transfer.bytes for transfer in transfers if not transfer.hidden)
    assert exposed < 0.06 * sum(hidden.values())


def test_matrices_travel_to_be_whole_in_the_dtype_of_the_iterates():
    def sent(iterates, compute):
        config = load_config("configs/tiny.yaml", [f"optimizer.muon.newton_schulz_dtype={iterates}", "parallel.data=4"])
        config = dataclasses.replace(config, train=dataclasses.replace(config.train, compute_dtype=compute))
        program = simulated_programs(config, 4)[0]
        (transfer,) = _muon(program)
        return transfer.bytes

    low = sent("bfloat16", "bfloat16")
    assert sent("float32", "bfloat16") == 2 * low
    with jax.enable_x64(True):
        assert sent("bfloat16", "float64") == sent("float32", "float64") == 4 * low


def test_latent_keys_and_values_take_a_kibibyte_a_token_and_layer():
    """docs/reference.md §4.1: gathered in the forward pass, again, and scattered in the backward pass."""
    assert by_what(3)["keys and values"] == 3 * 1024 * 40 * (131072 // 8) * 7


def test_tokens_travel_less_when_they_go_only_where_they_must():
    there = [by_what(0, ParallelConfig(expert=8, expert_exchange=way))["tokens to experts and back"]
             for way in ("all_gather", "ragged")]  # fmt: skip
    assert there[0] == 8 * there[1] == 2 * 3 * 4 * 4096 * 2048 * 2 * 40 * 7


def test_collectives_use_the_links_of_their_devices_one_after_another():
    device, sizes = HARDWARE["mi300x"], {"data": 2, "fsdp": 1, "expert": 1, "context": 8}
    inside, across = Transfer("", "all-gather", ("context",), 448e9), Transfer("", "all-gather", ("data",), 50e9)
    assert seconds([inside], sizes, device) == seconds([across], sizes, device) == 1.0
    assert seconds([inside, across], sizes, device) == 2.0
    both = Transfer("", "all-gather", ("data", "context"), 448e9)  # eight adapters of each node, faster than xGMI
    assert seconds([both], sizes, device) == 1.0


@given(st.permutations(AXES), st.lists(st.integers(1, 4), min_size=4, max_size=4), st.integers(1, 4))
def test_devices_of_a_group_are_those_of_the_mesh(order, counts, many):
    sizes, axes = dict(zip(AXES, counts, strict=True)), order[:many]
    mesh = np.arange(math.prod(counts)).reshape(counts)
    where = tuple(slice(None) if axis in axes else 0 for axis in AXES)
    assert group_devices(axes, sizes) == sorted(mesh[where].reshape(-1).tolist())


def test_what_is_frozen_is_gathered_and_has_no_gradient_on_the_wire():
    lora = ["lora.rank=16", "lora.alpha=32", "parallel.fsdp=8", "train.remat=full"]
    whole, small = (
        estimate_phase(simulated_programs(load_config("configs/finetune.yaml", more), 8), 0, None)
        for more in (lora[2:], lora)
    )

    def sent(estimate, kind):
        return sum(transfer.bytes for transfer in estimate.transfers if transfer.kind == kind)

    # Each micro-batch a device sends the gradients of the parts of seven others.
    assert sent(small, "reduce-scatter") == pytest.approx(7 * small.memory.parameters * small.micro_batches, rel=0.01)
    assert sent(small, "reduce-scatter") < sent(whole, "reduce-scatter") / 50
    assert sent(small, "all-to-all") == 0  # AdamW needs no whole matrices
    assert sent(small, "all-gather") > sent(whole, "all-gather")  # adapters beside the matrices
    assert small.flops["newton_schulz"] == 0 < whole.flops["newton_schulz"]
    assert small.flops["head"] == pytest.approx(whole.flops["head"] * 2 / 3)
