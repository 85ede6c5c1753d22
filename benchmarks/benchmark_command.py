"""What the benchmarks share: the command line, the header of a result, timing of sides in turn, and training runs."""

import contextlib
import functools
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from zaya_jax.errors import RunStopped
from zaya_jax.lab.measure.timing import interleave_subprocesses
from zaya_jax.lab.result import describe_run, rounded
from zaya_jax.lab.verbs import Run, add_flags, help_texts, run_verb
from zaya_jax.run.parser import Parser

Flags = dict[str, dict[str, Any]]  # arguments of `add_argument` by name of the flag
OVERRIDES = {"nargs": "*", "metavar": "section.key=value", "help": "configuration value to override"}


def flag(default: Any, metavar: str, text: str) -> dict[str, Any]:
    """Describe a flag whose help ends with its default; a list takes several values."""
    several = {"nargs": "+"} if isinstance(default, list) else {}
    values = default if several else [default]
    shown = " ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in values)
    settings = {"default": default, "type": type(values[0]), "metavar": metavar, **several}
    return {**settings, "help": f"{text} (default: {shown})"}


# Of the benchmarks that compare one dtype.
DTYPE: Flags = {"--dtype": {"choices": ("float32", "bfloat16"), "default": "float32", "help": "default: float32"}}


Main = Callable[[Sequence[str]], int]


def command(run: Run, flags: Flags, *, repeats: int | None = None, png: str | None = None, output: bool = True) -> Main:
    """Make the `main` of a benchmark; it returns 0, 1 if the result says that something `failed`, or 2 for bad input.

    `run` makes the result from the parsed arguments, and draws `--png`; its docstring is the help (`lab.verbs`). The
    other flags are those of `lab.verbs.add_flags`, if there is an `output`.
    """

    def run_and_draw(parsed: Any) -> dict[str, Any]:
        result = run(parsed)
        parsed.png = None  # drawn
        return result

    def main(arguments: Sequence[str]) -> int:
        name, texts = help_texts("python -m benchmarks", run)
        parser = Parser(prog=f"python -m benchmarks {name}", **texts)
        for each, settings in flags.items():
            parser.add_argument(each, **settings)
        if output:
            add_flags(parser, repeats=repeats, png=png)
        parser.set_defaults(run=run_and_draw)
        return run_verb(parser, arguments)

    return main


def share_device() -> None:
    """Let several processes use one GPU, before jax starts in the first of them."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def start_result(benchmark: str, size: str, peer: str, packages: Sequence[str]) -> dict[str, Any]:
    """Make the result of `describe_run` with the device, which processes will share, and with empty `results`."""
    import jax  # not earlier, since it would disturb a peer in its own process

    share_device()
    result = describe_run(benchmark, size, peer, packages)
    result["hardware"]["device"], result["results"] = jax.devices()[0].device_kind, {}
    return result


def time_sides(sides: Mapping[str, tuple[Any, ...]], repeats: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Time passes of all sides in turn, see `interleave_subprocesses`; returns their seconds, and the medians."""
    seconds = {name: passes.seconds for name, passes in interleave_subprocesses(sides, repeats).items()}
    return {name: rounded(each) for name, each in seconds.items()}, medians(seconds)


def peak_memory() -> int:
    """Return this process' peak resident memory in bytes: `ru_maxrss` may be that of the process that started it."""
    return 1024 * int(re.findall(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text(encoding="utf-8"))[0])


@contextlib.contextmanager
def training_process(
    config: Any, *changes: str, program: Sequence[str] = ("-m", "zaya_jax.main"), ends: Sequence[int] = (0,), **env: str
) -> Iterator[subprocess.Popen[bytes]]:
    """Train in another process, which is killed after the block; RunStopped if its status is not in `ends`."""
    command = [sys.executable, *program, "--config", str(config), *changes]
    with tempfile.TemporaryFile() as output:
        started = functools.partial(subprocess.Popen, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        with started(command, env={**os.environ, **env}) as process:
            try:
                yield process
            finally:
                process.kill()
        if process.returncode not in ends:
            output.seek(0)
            raise RunStopped(f"{' '.join(command)} failed: {output.read()[-500:].decode(errors='replace')}")


def medians(seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the median of each side."""
    return {name: statistics.median(each) for name, each in seconds.items()}
