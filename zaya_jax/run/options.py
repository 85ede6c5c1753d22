"""The command line of `zaya_jax.main`, which a supervisor reads, too, to find the run of a command."""

import argparse
import math
from collections.abc import Sequence

from zaya_jax.config import Config, load_config
from zaya_jax.errors import InputError
from zaya_jax.hardware.data_sheets import HARDWARE
from zaya_jax.run.parser import Parser

_EXAMPLES = """examples:
  python -m zaya_jax.main configs/tiny.yaml
  python -m zaya_jax.main --config configs/tiny.yaml run_dir=runs/other seed=1
  python -m zaya_jax.main --config configs/zaya1_8b.yaml --dry-run --devices 1024 --hardware mi300x

Rerunning a command resumes from the newest checkpoint in run_dir."""

MODEL_PATH = (  # help of commands that read a model
    "RUN_DIR (its newest checkpoint), RUN_DIR@PHASE (the last one of a phase), RUN_DIR/checkpoints/STEP, or a "
    "transformers folder; adapters are merged into their base"
)


def parse_training(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse a training command, whose overrides may stand anywhere; exits with status 2 if it is invalid."""
    parser = training_parser()
    options = parser.parse_intermixed_args(arguments)
    named = [text for text in options.overrides if _is_file(text, bool(options.config))]
    options.overrides = [text for text in options.overrides if text not in named]
    if not (files := [*options.config, *named]):
        parser.error("the configuration is missing; add its file, such as configs/tiny.yaml")
    if len(files) > 1:
        parser.error(f"{len(files)} configurations are named ({', '.join(files)}); name one; overrides are KEY=VALUE")
    (options.config,) = files
    return options


def _is_file(text: str, is_named: bool) -> bool:
    """Return whether an argument is no override but a configuration; without suffix, unless one is named already."""
    key, is_override, _ = text.partition("=")
    return (("/" in key or not is_override) and text.endswith((".yaml", ".yml"))) or not (is_override or is_named)


def training_parser() -> Parser:
    """Return the parser of the training command."""
    description = "Train a ZAYA1 model, or resume its training."
    parser = Parser(prog="python -m zaya_jax.main", description=description, epilog=_EXAMPLES)
    add = parser.add_argument
    text = "configuration file, such as configs/tiny.yaml (required; --config may be left out)"
    add("--config", action="append", default=[], metavar="FILE", help=text)
    add("--print-config", action="store_true", help="print the configuration with all defaults and overrides, and exit")
    text = "with --print-config: print the meaning of each key above it"
    add("--comments", action="store_true", help=text)
    add("--dry-run", action="store_true", help="estimate the memory and step time of each phase without training")
    add("--devices", type=int, metavar="N", help="number of devices to simulate (dry run only)")
    names, results = ", ".join(HARDWARE), "a file of make gpu-report, or a folder of machine's results"
    add("--hardware", metavar="NAME", help=f"hardware to simulate (dry run only): {names}, {results}")
    text = "compile with XLA's compiler for this GPU, without having one (dry run only)"
    add("--compile-for", metavar="GPU", help=f"{text}: {names}")
    text = "search layouts, remat and micro-batches for the fastest step that fits (dry run only)"
    add("--suggest", action="store_true", help=text)
    add("--json", action="store_true", help="print the result as JSON (dry run only)")
    add_job(parser)
    text = "stop when another process has been silent for this long (default: set by the preset)"
    add("--peer-timeout", type=float, metavar="SECONDS", help=text)
    add("overrides", nargs="*", metavar="section.key=value", help="configuration value to override, such as seed=1")
    return parser


def add_job(parser: argparse.ArgumentParser) -> None:
    """Add the flags with which a process joins a job."""
    add = parser.add_argument
    add("--coordinator", metavar="HOST:PORT", help="address of process 0 (default: set by the launcher)")
    add("--processes", type=int, metavar="N", help="number of processes in the job (default: set by the launcher)")
    add("--process", type=int, metavar="I", help="index of this process, from 0 (default: set by the launcher)")


def training_config(options: argparse.Namespace) -> Config:
    """Load the configuration of a training command; InputError if it, or options that contradict, are mistaken."""
    if options.dry_run and options.devices is None:
        raise InputError("--dry-run needs --devices N, the number of devices to simulate.")
    only_dry = (options.devices, options.hardware, options.compile_for)
    if not options.dry_run and (options.json or options.suggest or only_dry != (None, None, None)):
        flags = "--devices, --hardware, --compile-for, --suggest and --json"
        raise InputError(f"{flags} require --dry-run: add it, or remove them.")
    if options.comments and not options.print_config:
        raise InputError("--comments requires --print-config: add it, or remove --comments.")
    if options.peer_timeout is not None and not 0 < options.peer_timeout < math.inf:
        raise InputError(f"--peer-timeout is {options.peer_timeout:g}, but must be a finite number of seconds above 0.")
    return load_config(options.config, options.overrides)
