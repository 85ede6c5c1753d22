"""Layouts that cannot be are refused by key; pieces of a sequence."""

import pytest

from tests.config_helpers import SMALL, changed, refused
from zaya_jax.config import ParallelConfig, PhaseConfig


@pytest.mark.parametrize(("fields", "key"), [
    ({"data": 0}, "data"), ({"fsdp": 0}, "fsdp"), ({"expert": -1}, "expert"), ({"context": 0}, "context"),
    ({"expert": 3}, "expert"), ({"expert": 8}, "expert"), ({"context": 3}, "context"),
    ({"context": 3, "context_layout": "contiguous"}, "context"), ({"context": 16}, "context"),
])  # fmt: skip
def test_a_layout_that_cannot_be_is_refused_by_its_key(fields, key):
    assert refused({"parallel": ParallelConfig(**fields)}).startswith(f"parallel.{key} is {fields[key]}, but must be ")


def test_a_piece_holds_the_tokens_that_convolutions_look_back():
    four = {"parallel": ParallelConfig(context=8, context_layout="contiguous"), "model.depthwise_kernel": 4}
    changed(SMALL, four).check()  # pieces of four tokens, two taps in the other convolution
    five = four | {"model.depthwise_kernel": 5}
    assert "has at least 5 tokens" in refused(five)
    changed(SMALL, five | {"model.attention": "gqa"}).check()  # has no convolutions


def test_a_phase_is_refused_by_its_own_key():
    phase = PhaseConfig(1000, "mid", parallel=ParallelConfig(expert=3))
    assert "phases.mid.parallel.expert is 3" in refused({"phases": (PhaseConfig(1000), phase)})
    longer = PhaseConfig(1000, "mid", context=64, parallel=ParallelConfig(context=32))
    assert "phases.mid.parallel.context is 32" in refused({"phases": (PhaseConfig(1000), longer)})


def test_a_phase_has_the_layout_of_the_run_or_its_own():
    own = ParallelConfig(context=2)
    phases = (PhaseConfig(1000), PhaseConfig(1000, "mid", parallel=own))
    config = changed(SMALL, {"parallel": ParallelConfig(fsdp=2), "phases": phases})
    assert [config.parallel_for(phase) for phase in phases] == [ParallelConfig(fsdp=2), own]


@pytest.mark.parametrize(("context", "layout", "chunks"), [(1, "zigzag", 1), (4, "zigzag", 8), (4, "contiguous", 4)])
def test_zigzag_cuts_twice_as_many_pieces(context, layout, chunks):
    assert ParallelConfig(context=context, context_layout=layout).chunks == chunks
