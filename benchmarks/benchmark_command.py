"""The command line of a benchmark."""

import argparse
from collections.abc import Callable, Sequence

from zaya_jax.config.checks import require
from zaya_jax.hardware.environment import keep_compilations
from zaya_jax.lab.verbs import Run, add_flags, help_texts, run_verb
from zaya_jax.run.parser import Parser


def run_benchmark(
    run: Run, arguments: Sequence[str], add: Callable[[Parser], object] = lambda _: None, *,
    repeats: int | None = None, png: str | None = None,
) -> int:  # fmt: skip
    """Parse the arguments of a benchmark, run it, and write its result to `--output`.

    Args:
      run: from the parsed arguments, makes the result; its docstring is the help, see `lab.verbs.add_verb`.
      arguments: the arguments after the benchmark's name.
      add: adds flags of this benchmark.
      repeats: see `lab.verbs.add_flags`.
      png: likewise.

    Returns:
      The exit status: 0, 1 if the result says that something `failed`, or 2 for bad input.
    """
    name, texts = help_texts("python -m benchmarks", run)
    parser = Parser(prog=f"python -m benchmarks {name}", **texts)
    add(parser)
    add_flags(parser, repeats=repeats, png=png)
    parser.set_defaults(run=run)
    return run_verb(parser, arguments)


def prepare_trainings(parsed: argparse.Namespace) -> None:
    """Check `--steps`, and keep compiled programs: the seeds of a variant run the same ones."""
    require(parsed.steps >= 20, "--steps", parsed.steps, "at least 20: the warm-up takes 10 steps")
    keep_compilations()


def add_run(parser: Parser) -> None:
    """Add a configuration to train, and its overrides."""
    parser.add_argument("--config", metavar="FILE", default="configs/tiny.yaml",
                        help="configuration to train (default: configs/tiny.yaml)")  # fmt: skip
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="configuration value to override")


def add_steps(parser: Parser, steps: int, meaning: str) -> None:
    """Add `--steps`."""
    parser.add_argument("--steps", type=int, default=steps, metavar="N",
                        help=f"{meaning}, at least 20 (default: {steps})")  # fmt: skip
