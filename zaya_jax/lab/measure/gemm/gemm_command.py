"""The verb `gemm` of `python -m zaya_jax.machine`."""

import argparse
from typing import Any

from zaya_jax.config import load_config
from zaya_jax.config.stages import largest_stage, micro_batch
from zaya_jax.errors import InputError
from zaya_jax.hardware.data_sheets import HARDWARE
from zaya_jax.lab.verbs import add_config, add_flags, add_verb, parse_bytes

_DTYPES = ("bfloat16", "float32")
FAMILIES = ("square", "stride", "model", "experts", "newton_schulz", "attention")


def add(verbs: Any, program: str) -> None:
    """Add the verb to the parser of `program`."""
    verb = add_verb(verbs, program, _run)
    add_config(verb)
    verb.add_argument("--families", nargs="+", choices=FAMILIES, default=FAMILIES, metavar="FAMILY",
                      help=f"what to measure; squares always are (default: all): {', '.join(FAMILIES)}")  # fmt: skip
    verb.add_argument("--dtype", choices=_DTYPES, help="of the operands (default: train.compute_dtype)")
    verb.add_argument("--squares", nargs=3, type=int, default=[256, 4096, 256], metavar=("FIRST", "LAST", "STEP"),
                      help="sizes of the square matrices (default: 256 4096 256)")  # fmt: skip
    verb.add_argument("--lengths", nargs="+", type=int, default=[1024, 4096], metavar="N",
                      help="tokens of a row of attention (default: 1024 4096)")  # fmt: skip
    verb.add_argument("--tokens", type=int, metavar="N",
                      help="tokens of a micro-batch on one device (default: those of the first phase, or of its "
                      "whole step if micro_batch is null)")  # fmt: skip
    verb.add_argument("--routing", metavar="RUN", help="also measure experts with the token counts of this run")
    verb.add_argument("--flush", default="512M", metavar="SIZE", help="bytes that are overwritten before a cold call, "
                      "at least the size of the last-level cache (default: 512M)")  # fmt: skip
    verb.add_argument("--compile-for", metavar="GPU", help=f"compile the products for {', '.join(HARDWARE)}, "
                      "which need not be here, and predict their speeds instead of measuring")  # fmt: skip
    add_flags(verb, repeats=5, png="the speeds")


def _run(parsed: argparse.Namespace) -> dict[str, Any]:
    """Measure matrix products: squares, and those of a configuration.

    Prints the speed of each product with its operands in the caches and without, and its share of the fastest square's
    speed.

    gemm configs/zaya1_8b.yaml --routing runs/zaya1_8b --png gemm.png
    """
    first, last, step = parsed.squares
    if not (1 <= first <= last and step >= 1):
        raise InputError(f"--squares is {first} {last} {step}, but must be FIRST ≤ LAST and a STEP, all at least 1.")
    for flag, values in (("--lengths", parsed.lengths), ("--tokens", [] if parsed.tokens is None else [parsed.tokens])):
        if wrong := [value for value in values if value < 1]:
            raise InputError(f"{flag} is {wrong[0]}, but must be at least 1.")
    flush, config = parse_bytes("--flush", parsed.flush), load_config(parsed.config, parsed.overrides)
    dtype, phase = parsed.dtype or config.train.compute_dtype, config.phases[0]
    if dtype not in _DTYPES:
        raise InputError(f"train.compute_dtype is {dtype}, but products are measured in {' or '.join(_DTYPES)}: set "
                         "--dtype.")  # fmt: skip
    stage = largest_stage(config, 0)
    tokens = parsed.tokens or micro_batch(config, stage, 1) * stage.context // config.parallel_for(phase).context
    from zaya_jax.lab.measure.gemm.gemm_sweep import Request, measure_gemm

    request = Request(parsed.families, dtype, list(range(first, last + 1, step)),
                      parsed.lengths, tokens, parsed.routing, flush, parsed.repeats)  # fmt: skip
    if parsed.compile_for is None:
        return measure_gemm(config, request)
    if parsed.png is not None:
        raise InputError("--png plots measured speeds: leave it out with --compile-for.")
    from zaya_jax.lab.measure.gemm.compiled import compile_gemm

    return compile_gemm(config, request, parsed.compile_for)
