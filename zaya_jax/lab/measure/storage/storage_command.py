"""The verb `storage` of `python -m zaya_jax.machine`."""

import argparse
from typing import Any

from zaya_jax.config import load_config
from zaya_jax.config.checks import require
from zaya_jax.lab.verbs import add_config, add_flags, add_verb, parse_bytes

_SMALLEST = 2**20  # bytes


def add(verbs: Any, program: str) -> None:
    """Add the verb to the parser of `program`."""
    verb = add_verb(verbs, program, _run)
    add_config(verb)
    verb.add_argument("--size", default="1G", help="size of the file and of the state (default: 1G)")
    verb.add_argument("--threads", nargs="+", type=int, default=[1, 16], metavar="N",
                      help="numbers of concurrent threads (default: 1 16)")  # fmt: skip
    add_flags(verb, repeats=3)


def _run(parsed: argparse.Namespace) -> dict[str, Any]:
    """Measure reads of data, and saves and restores of checkpoints.

    Reads a file in the folder of the data, cold and warm, saves and restores a state in the folder of the run, and
    prints the shortest step that the storage can feed. Removes what it writes.

    storage configs/zaya1_8b.yaml --size 8G --threads 1 16 64
    """
    size = parse_bytes("--size", parsed.size)
    require(size >= _SMALLEST, "--size", parsed.size, "at least 1M")
    for count in parsed.threads:
        require(1 <= count <= 256, "--threads", count, "between 1 and 256")
    config = load_config(parsed.config, parsed.overrides)
    from zaya_jax.lab.measure.storage.storage_sweep import measure_storage

    return measure_storage(config, size, parsed.threads, parsed.repeats)
