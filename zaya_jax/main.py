"""Train a model: `python -m zaya_jax.main --config configs/tiny.yaml [section.key=value ...]`."""

import atexit
import faulthandler
import signal
import sys
import threading

from zaya_jax.hardware.huge_pages import use_huge_pages
from zaya_jax.run.command import Unescaped, prepare_streams, status_of_output
from zaya_jax.run.progress_record import Phase, record_from_environment
from zaya_jax.run.signals import NAMES, Listener, exit_status, ignore_signals, say_and_exit, warn

if __name__ == "__main__":  # before the imports below, during which Ctrl-C would end in a traceback or be swallowed
    prepare_streams()
    record = record_from_environment()  # a supervisor sees that a trainer has started, also if an import below fails
    use_huge_pages()
    faulthandler.register(signal.SIGUSR1)  # prints the stacks of all threads, even of a process that hangs
    atexit.register(ignore_signals)  # exit handlers run in reverse order, so this one runs last

    def _stop(number: int) -> None:
        sentence, status = f"Stopped by {NAMES[number]}.", exit_status(number)
        record.end(status, sentence, is_origin=True)
        say_and_exit(sentence, status)

    Listener(_stop).__enter__()

import argparse
import os
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TextIO, cast

from zaya_jax.config import Config, load_config, to_yaml
from zaya_jax.errors import ExitCode, InputError, Preempted, exit_message, exit_reason, is_expected
from zaya_jax.hardware.detection import select_preset
from zaya_jax.hardware.environment import apply_preset, keep_compilations
from zaya_jax.hardware.measurements import measured_preset
from zaya_jax.hardware.presets import Preset
from zaya_jax.run.checkpoints import CHECKPOINTS, named_steps
from zaya_jax.run.options import parse_training
from zaya_jax.run.status import mark_stopped
from zaya_jax.run.supervised import end_with_supervisor

if TYPE_CHECKING:
    from zaya_jax.job.peer_liveness import PeerLiveness


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
      The exit status, see `ExitCode`.
    """
    process = _Process()
    try:
        options = parse_training(arguments)
    except SystemExit as end:  # of argparse: `--help`, or an invalid option
        sentence = "The command line is invalid." if end.code else "Finished."
        process.progress.end(int(end.code or 0), sentence, is_origin=True)
        raise
    end_with_supervisor()
    with Listener(process.stop):
        try:
            config = _config(options)
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


def _train(config: Config, options: argparse.Namespace, process: "_Process") -> None:
    process.run_dir = config.run_dir
    preset = _prepare_jax(config)
    from zaya_jax.job.multihost import is_primary, join
    from zaya_jax.train.loop import run_training
    from zaya_jax.train.report import report

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
    _prepare_jax(config, "cpu")
    from zaya_jax.lab.predict.compilers.toolchain import silence_plugins
    from zaya_jax.lab.predict.dry_run.report import dry_run

    silence_plugins()

    hardware, gpu = options.hardware, options.compile_for
    print(dry_run(config, options.devices, hardware, options.json, gpu, options.suggest))


class _Process:
    """Ends this process, and every other process of its job, with the same one-sentence message."""

    def __init__(self) -> None:
        self.run_dir = ""  # empty until training starts
        self.peers: PeerLiveness | None = None  # the other processes of the job
        self.progress = record_from_environment()

    def stop(self, number: int) -> None:
        """Exit at once: there is nothing to save, or this is the second signal."""
        sentence, status = f"Stopped by {NAMES[number]}.{_saved(self.run_dir)}", exit_status(number)
        self.progress.end(status, sentence, is_origin=True)
        if self.run_dir:
            folder = Path(os.path.expanduser(self.run_dir))
            writer = threading.Thread(target=mark_stopped, args=(folder, status, sentence), daemon=True)
            writer.start()
            writer.join(1)  # not longer, since the file system may hang
        self.leave(Preempted(sentence, status))

    def end(self, error: BaseException) -> int:
        """Print why the run ends, and return the exit status."""
        if self.peers is not None:
            self.leave(error)
        sentence, status = exit_message(error)
        self.progress.end(status, sentence, is_origin=True, reason=exit_reason(error))
        warn(sentence)
        return status

    def leave(self, error: BaseException) -> NoReturn:
        """Print why the run ends, and end the job at once, from any thread."""
        sentence, status = exit_message(error)
        self.progress.end(status, sentence, is_origin=True, reason=exit_reason(error))  # ignored if `stop` has left it
        leave = say_and_exit if self.peers is None else self.peers.leave
        leave(sentence, status)

    def fail(self, error: Exception) -> NoReturn:
        """End the whole job after an error in this process, which the loss of another process may have caused."""
        if self.peers is None:
            self.progress.end(ExitCode.STOPPED, _describe(error), is_origin=True)
            raise error
        from zaya_jax.job.multihost import is_peer_loss

        if is_peer_loss(error):
            self.peers.wait()  # until the peer timeout names the lost process, and ends this one
        else:
            traceback.print_exc()
        self.progress.end(ExitCode.STOPPED, _describe(error), is_origin=not is_peer_loss(error))
        why = (str(error).splitlines() or [type(error).__name__])[0][:300].removesuffix(".")
        self.peers.leave(f"Stopped: {why}.{_saved(self.run_dir)}", ExitCode.STOPPED)


def _describe(error: Exception) -> str:
    """Describe an unexpected error by its type, message and the line that raised it."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {str(error)[:300]} ({Path(frame.filename).name}:{frame.lineno} in {frame.name})"


def _saved(run_dir: str) -> str:
    """Name the newest checkpoint, for the message of a run that ends without saving."""
    if not run_dir:
        return ""
    steps = named_steps(Path(os.path.expanduser(run_dir)) / CHECKPOINTS)
    if not steps:
        return f" {run_dir} has no checkpoint yet: rerunning the command starts from the first step."
    return f" The newest checkpoint in {run_dir} is step {steps[-1]}: rerunning the command resumes from it."


def _config(options: argparse.Namespace) -> Config:
    if options.dry_run and options.devices is None:
        raise InputError("--dry-run needs --devices N, the number of devices to simulate.")
    only_dry = (options.devices, options.hardware, options.compile_for)
    if not options.dry_run and (options.json or options.suggest or any(option is not None for option in only_dry)):
        raise InputError("--devices, --hardware, --compile-for, --suggest and --json require --dry-run: add it, or "
                         "remove them.")  # fmt: skip
    if options.peer_timeout is not None and not 0 < options.peer_timeout < float("inf"):
        raise InputError(f"--peer-timeout is {options.peer_timeout:g}, but must be a finite number of seconds above 0.")
    return load_config(options.config, options.overrides)


def _prepare_jax(config: Config, platform: str | None = None) -> Preset:
    """Set the environment and jax's flags, which must happen before jax initializes its backend."""
    preset = select_preset(config.preset)
    if "jax" not in sys.modules:  # once jax is imported, XLA may have read its flags already
        if platform is None:
            apply_preset(preset if config.measurements is None else measured_preset(preset, config.measurements))
            keep_compilations()
        else:
            os.environ["JAX_PLATFORMS"] = platform
    import jax

    if config.train.compute_dtype == "float64":
        jax.config.update("jax_enable_x64", True)
    return preset


if __name__ == "__main__":
    sys.exit(main())
