"""The model shapes that `sizing --suggest` compares: other widths with about as many parameters."""

import dataclasses
from collections.abc import Iterator
from fractions import Fraction

from zaya_jax.config import ModelConfig
from zaya_jax.errors import InputError
from zaya_jax.model.arithmetic import active_parameters, total_parameters

# Factors of the configuration's own sizes.
WIDTHS = tuple(Fraction(x, 8) for x in (6, 7, 8, 9, 10, 12))  # hidden_size
HEADS = tuple(Fraction(x, 2) for x in (1, 2, 4))  # width of the queries relative to hidden_size: half to twice it
EXPERTS = tuple(Fraction(x, 4) for x in (2, 3, 4, 5, 6, 8, 16))  # num_experts
EXPERT_WIDTHS = Fraction(1, 2), Fraction(2)  # limits of expert_size relative to hidden_size


def candidate_shapes(model: ModelConfig, band: float, layers: tuple[int, int]) -> list[ModelConfig]:
    """Return the shapes to compare, the configuration's own first.

    `hidden_size`, `num_query_heads` and `num_experts` take the factors above, `expert_size` every multiple of the step
    within its limits, and `num_layers` the number that brings the total parameters closest to the configuration's.
    Widths are rounded to multiples of 256, or of 64 for a `hidden_size` below 1,024; query heads to multiples of the
    key and value heads. All other keys stay, those of keys and values among them, which set the size of the cache.

    Args:
      model: the configuration's shape.
      band: largest relative difference of the total, and of the active parameters, from the configuration's.
      layers: smallest and largest number of layers.
    """
    total, active = total_parameters(model), active_parameters(model)
    shapes = {model: None}
    for shape, outside, of_layer in _without_depth(model):
        whole_layer, period = of_layer + shape.num_experts * _expert(shape), len(shape.layer_pattern)
        depth = max(1, round((total - outside) / whole_layer / period)) * period
        shape_total = outside + depth * whole_layer
        idle = depth * (shape.num_experts - 1) * _expert(shape)
        shape_active = shape_total - idle - shape.vocab_size * shape.hidden_size
        near = abs(shape_total - total) <= band * total and abs(shape_active - active) <= band * active
        if near and layers[0] <= depth <= layers[1]:
            shapes[dataclasses.replace(shape, num_layers=depth)] = None
    return list(shapes)


def _expert(shape: ModelConfig) -> int:
    """Count the parameters of an expert of one layer."""
    return 3 * shape.hidden_size * shape.expert_size


def _without_depth(model: ModelConfig) -> Iterator[tuple[ModelConfig, int, int]]:
    """Yield the shapes of every width, each with its parameters outside the layers, and in a layer outside experts."""
    step = 256 if model.hidden_size >= 1024 else 64
    period = len(model.layer_pattern)
    for width in sorted({_multiple(model.hidden_size * factor, step) for factor in WIDTHS}):
        scale = Fraction(width, model.hidden_size)
        shallow = dataclasses.replace(model, hidden_size=width, num_layers=period)
        outside = 2 * total_parameters(shallow) - total_parameters(dataclasses.replace(shallow, num_layers=2 * period))
        for heads in sorted({_multiple(model.num_query_heads * scale * x, model.num_kv_heads) for x in HEADS}):
            for experts in sorted({max(1, round(model.num_experts * factor)) for factor in EXPERTS}):
                shape = dataclasses.replace(shallow, num_query_heads=heads, num_experts=experts)
                try:
                    shape.check()
                except InputError:
                    continue
                of_layer = (total_parameters(shape) - outside) // period - experts * _expert(shape)
                low, high = (model.expert_size * scale * factor for factor in EXPERT_WIDTHS)
                for expert_width in range(step, int(high) + 1, step):
                    if expert_width >= low:
                        yield dataclasses.replace(shape, expert_size=expert_width), outside, of_layer


def _multiple(value: Fraction, step: int) -> int:
    """Return the multiple of `step` that is closest to `value`, and at least one step."""
    return max(1, round(value / step)) * step
