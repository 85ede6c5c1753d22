"""Train a model: `python -m zaya_jax.main --config configs/tiny.yaml [section.key=value ...]`."""

import sys

from zaya_jax.run.command_output import prepare_process

if __name__ == "__main__":
    prepare_process()  # before the imports below

import argparse
from collections.abc import Sequence

from zaya_jax.config import Config, to_yaml
from zaya_jax.errors import ExitCode, is_expected
from zaya_jax.job.jax_setup import prepare_jax
from zaya_jax.job.process import TrainingProcess
from zaya_jax.run.command_output import Unescaped, output_status
from zaya_jax.run.files import expanded
from zaya_jax.run.options import parse_training, training_config
from zaya_jax.run.progress_record import Phase, end_with_supervisor
from zaya_jax.run.signals import Listener
from zaya_jax.run.standby import is_standby, wait_for_place


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status, see `ExitCode`."""
    process = TrainingProcess()
    end_with_supervisor()
    with Listener(process.stop):
        try:
            options = parse_training(arguments)
        except SystemExit as end:  # of argparse: `--help`, or an invalid option
            sentence = "The command line is invalid." if end.code else "Finished."
            process.progress.end(int(end.code or 0), sentence, is_origin=True)
            raise
        try:
            config = training_config(options)
            if options.print_config:  # a program that reads it needs every character
                output = sys.stdout if sys.stdout.isatty() else Unescaped(sys.stdout)
                output.write(to_yaml(config, comments=options.comments))
            elif options.dry_run:
                _dry_run(config, options)
            else:
                _train(config, options, process)
        except (KeyboardInterrupt, Exception) as error:
            if isinstance(error, Exception) and not is_expected(error):
                process.fail(error)
            return process.end(error)
    process.progress.end(ExitCode.OK, "Finished.", is_origin=True)
    return output_status() if options.print_config or options.dry_run else ExitCode.OK


def _train(config: Config, options: argparse.Namespace, process: TrainingProcess) -> None:
    process.run_dir = config.run_dir
    preset = prepare_jax(config)
    from zaya_jax.data.loading.sources import open_sources
    from zaya_jax.job.multihost import is_primary, join
    from zaya_jax.train.final_report import report
    from zaya_jax.train.fit import run_training

    progress = process.progress
    if is_standby():
        open_sources(config)  # so that this node has read what it needs of them
        options = parse_training(wait_for_place())
        config = training_config(options)
        progress.restart()
    progress.enter(Phase.JOIN)
    flags = options.coordinator, options.processes, options.process
    timeout = options.peer_timeout or preset.peer_timeout
    process.peers = join(flags, preset.join_seconds, timeout, progress, expanded(config.run_dir))
    result = run_training(config, process.peers, progress, process.leave)
    progress.enter(Phase.FINISH)
    text = report(config, result)
    if is_primary():
        print(text)


def _dry_run(config: Config, options: argparse.Namespace) -> None:
    prepare_jax(config, "cpu")
    from zaya_jax.lab.predict.compilers.toolchain import silence_plugins
    from zaya_jax.lab.predict.dry_run.dry_run_report import dry_run

    silence_plugins()
    print(dry_run(config, options.devices, options.hardware, options.json, options.compile_for, options.suggest))


if __name__ == "__main__":
    sys.exit(main())
