"""The verb `memory` of `python -m zaya_jax.machine`."""

import argparse
from typing import Any

from zaya_jax.config import load_config
from zaya_jax.errors import InputError
from zaya_jax.lab.verbs import add_flags, add_verb, parse_bytes

_SMALLEST = 4096  # bytes of an array


def add(verbs: Any, program: str) -> None:
    """Add the verb to the parser of `program`."""
    verb = add_verb(verbs, program, _run)
    verb.add_argument("--sizes", nargs="+", default=["256M"], metavar="SIZE", help="sizes of an array; the largest "
                      "should be at least four times the last-level cache (default: 256M)")  # fmt: skip
    verb.add_argument("--config", default="configs/zaya1_8b.yaml", metavar="FILE", help="configuration whose "
                      "widths the model's operations have (default: configs/zaya1_8b.yaml)")  # fmt: skip
    verb.add_argument("--stream", action="store_true", help="also measure the triad in C with OpenMP, compiled by cc "
                      "(CPU only)")  # fmt: skip
    add_flags(verb, repeats=20, png="bandwidth against the size of an array")


def _run(parsed: argparse.Namespace) -> dict[str, Any]:
    """Measure memory bandwidth, and the share of it that the model's operations reach.

    Runs BabelStream's copy, mul, add, triad and dot on the first device, then the model's memory-bound operations.

    memory --sizes 1M 16M 256M --stream
    """
    sizes = [parse_bytes("--sizes", text) for text in parsed.sizes]
    if small := [text for text, size in zip(parsed.sizes, sizes, strict=True) if size < _SMALLEST]:
        raise InputError(f"--sizes is {small[0]}, but must be at least {_SMALLEST}.")
    model = load_config(parsed.config).model
    import jax

    if parsed.stream and jax.default_backend() != "cpu":
        raise InputError(f"--stream is only for CPUs, but JAX uses {jax.default_backend()}. Remove it.")
    from zaya_jax.lab.measure.memory.memory_sweep import measure_memory

    return measure_memory(sorted(set(sizes)), model, parsed.repeats, stream=parsed.stream)
