"""Widths, layers, and architectures that cannot be."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.config_helpers import SMALL, changed, refused
from tests.helpers import TINY


@pytest.mark.parametrize(("changes", "named"), [
    ({"num_query_heads": 3}, "num_query_heads"),
    ({"num_kv_heads": 1, "head_dim": 7, "rotary_fraction": 0.0}, "head_dim"),
    ({"rotary_fraction": -0.1}, "rotary_fraction"),
    ({"rotary_fraction": 1.1}, "rotary_fraction"),
    ({"rotary_fraction": 0.375}, "rotary_fraction"),
    ({"layer_pattern": ()}, "layer_pattern"),
    ({"layer_pattern": ("full", "full", "full")}, "layer_pattern"),
    ({"layer_pattern": ("sliding",)}, "sliding_window"),
    ({"layer_pattern": ("sliding",), "sliding_window": 0}, "sliding_window"),
    ({"router_layers": 4}, "router_layers"),
    ({"attention": "gqa", "convolutions": False}, "convolutions"),
    ({"attention": "gqa_qk_norm", "value_shift": False}, "value_shift"),
    ({"router": "linear", "router_layers": 1}, "router_layers"),
    ({"router": "linear", "depth_averaging": False}, "depth_averaging"),
])  # fmt: skip
def test_impossible_architectures_are_named(changes, named):
    message = refused({f"model.{key}": value for key, value in changes.items()})
    assert message.startswith(f"model.{named} is ")
    assert ", but must be " in message


@pytest.mark.parametrize("changes", [
    {"rotary_fraction": 0.0}, {"rotary_fraction": 1.0}, {"num_kv_heads": 1, "num_query_heads": 1},
])  # fmt: skip
def test_the_edges_of_the_possible(changes):
    changed(SMALL, {f"model.{key}": value for key, value in changes.items()}).check()


@given(pattern=st.lists(st.sampled_from(["full", "sliding"]), min_size=1, max_size=6), repeats=st.integers(1, 3))
def test_the_period_is_the_shortest_pattern_of_the_same_layers(pattern, repeats):
    layers = tuple(pattern) * repeats
    config = dataclasses.replace(TINY, layer_pattern=layers, num_layers=len(layers) * 2, sliding_window=3)
    period = config.period
    assert period * config.num_groups == layers * 2
    for length in range(1, len(period)):
        if len(layers) % length == 0:
            assert layers[:length] * (len(layers) // length) != layers, "a shorter one would do"


def test_widths_follow_from_heads():
    assert (TINY.query_size, TINY.kv_size, TINY.rotary_size) == (32, 16, 4)
