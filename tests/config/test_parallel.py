"""Layouts that cannot be are refused by key; pieces of a sequence."""

import pytest

from tests.config_helpers import SMALL, changed, refused
from zaya_jax.config import ParallelConfig, PhaseConfig

BAD = [
    ({"data": 0}, "parallel.data is 0, but must be greater than zero."),
    ({"fsdp": 0}, "parallel.fsdp is 0, but must be greater than zero."),
    ({"expert": -1}, "parallel.expert is -1, but must be greater than zero."),
    ({"context": 0}, "parallel.context is 0, but must be greater than zero."),
    ({"expert": 3}, "parallel.expert is 3, but must be a number that divides model.num_experts (4)."),
    ({"expert": 8}, "parallel.expert is 8, but must be a number that divides model.num_experts (4)."),
    ({"context": 3}, "cuts the context (32) into whole pieces, 6 of them with context_layout zigzag."),
    ({"context": 3, "context_layout": "contiguous"}, "whole pieces, 3 of them with context_layout contiguous."),
    (
        {"context": 16},
        "parallel.context is 16, but must be such that a piece holds the 2 tokens that convolutions",
    ),
]


@pytest.mark.parametrize(("fields", "said"), BAD)
def test_a_layout_that_cannot_be_is_refused(fields, said):
    assert said in refused({"parallel": ParallelConfig(**fields)})


def test_a_phase_is_refused_by_its_own_key():
    phase = PhaseConfig(1000, "mid", parallel=ParallelConfig(expert=3))
    assert "phases.mid.parallel.expert is 3" in refused({"phases": (PhaseConfig(1000), phase)})
    longer = PhaseConfig(1000, "mid", context=64, parallel=ParallelConfig(context=32))
    assert "phases.mid.parallel.context is 32" in refused({"phases": (PhaseConfig(1000), longer)})


def test_a_phase_has_the_layout_of_the_run_or_its_own():
    own = ParallelConfig(context=2)
    phases = (PhaseConfig(1000), PhaseConfig(1000, "mid", parallel=own))
    config = changed(SMALL, {"parallel": ParallelConfig(fsdp=2), "phases": phases})
    assert [config.parallel_of(phase) for phase in phases] == [ParallelConfig(fsdp=2), own]


@pytest.mark.parametrize(("context", "layout", "chunks"), [(1, "zigzag", 1), (4, "zigzag", 8), (4, "contiguous", 4)])
def test_zigzag_cuts_twice_as_many_pieces(context, layout, chunks):
    assert ParallelConfig(context=context, context_layout=layout).chunks == chunks
