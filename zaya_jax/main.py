"""Train a model: `python -m zaya_jax.main --config configs/tiny.yaml [section.key=value ...]`."""

import sys

from zaya_jax.run.startup import prepare_process

if __name__ == "__main__":
    prepare_process()  # before the imports below

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO, cast

from zaya_jax.config import Config, to_yaml
from zaya_jax.errors import ExitCode, is_expected
from zaya_jax.job.jax_setup import prepare_jax
from zaya_jax.job.process import TrainingProcess
from zaya_jax.run.command_output import Unescaped, status_of_output
from zaya_jax.run.options import parse_training, training_config
from zaya_jax.run.progress_record import Phase, end_with_supervisor
from zaya_jax.run.signals import Listener


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
      The exit status, see `ExitCode`.
    """
    process = TrainingProcess()
    try:
        options = parse_training(arguments)
    except SystemExit as end:  # of argparse: `--help`, or an invalid option
        sentence = "The command line is invalid." if end.code else "Finished."
        process.progress.end(int(end.code or 0), sentence, is_origin=True)
        raise
    end_with_supervisor()
    with Listener(process.stop):
        try:
            config = training_config(options)
            if options.print_config:
                # A program that reads it needs every character.
                output = sys.stdout if sys.stdout.isatty() else cast("TextIO", Unescaped(sys.stdout))
                print(to_yaml(config), end="", file=output)
            elif options.dry_run:
                _dry_run(config, options)
            else:
                _train(config, options, process)
        except KeyboardInterrupt as error:
            return process.end(error)
        except Exception as error:
            if is_expected(error):
                return process.end(error)
            process.fail(error)
    process.progress.end(ExitCode.OK, "Finished.", is_origin=True)
    return status_of_output() if options.print_config or options.dry_run else ExitCode.OK


def _train(config: Config, options: argparse.Namespace, process: TrainingProcess) -> None:
    process.run_dir = config.run_dir
    preset = prepare_jax(config)
    from zaya_jax.job.multihost import is_primary, join
    from zaya_jax.train.final_report import report
    from zaya_jax.train.loop import run_training

    timeout = preset.peer_timeout if options.peer_timeout is None else options.peer_timeout
    progress = process.progress
    progress.enter(Phase.JOIN)
    process.peers = join(options.coordinator, options.processes, options.process, preset.join_seconds, timeout,
                         progress, Path(os.path.expanduser(config.run_dir)))  # fmt: skip
    result = run_training(config, process.peers, progress, process.leave)
    progress.enter(Phase.FINISH)
    if is_primary() and config.sample.tokens:
        print("Continuing the sample prompt", flush=True)
    text = report(config, result)
    if is_primary():
        print(text)


def _dry_run(config: Config, options: argparse.Namespace) -> None:
    prepare_jax(config, "cpu")
    from zaya_jax.lab.predict.compilers.toolchain import silence_plugins
    from zaya_jax.lab.predict.dry_run.dry_run_report import dry_run

    silence_plugins()

    hardware, gpu = options.hardware, options.compile_for
    print(dry_run(config, options.devices, hardware, options.json, gpu, options.suggest))


if __name__ == "__main__":
    sys.exit(main())
