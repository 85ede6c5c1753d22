"""Train: `python -m zaya_jax.main --config configs/tiny.yaml [section.key=value ...]`."""

import atexit
import sys

from zaya_jax.run.signals import NAMES, Listener, exit_status, ignore_signals, say_and_exit, warn

if __name__ == "__main__":  # before the imports below, during which Ctrl-C would end in a traceback or be swallowed
    atexit.register(ignore_signals)  # what is registered first is called last
    Listener(lambda number: say_and_exit(f"Stopped by {NAMES[number]}.", exit_status(number))).__enter__()

import argparse
import os
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from zaya_jax.config import Config, load_config, to_yaml
from zaya_jax.errors import ExitCode, InputError, Preempted, RunStopped, is_disk_full, last_words
from zaya_jax.hardware.data_sheets import HARDWARE
from zaya_jax.hardware.detection import select_preset
from zaya_jax.hardware.environment import apply_preset
from zaya_jax.hardware.presets import Preset
from zaya_jax.run.checkpoints import CHECKPOINTS, named_steps

if TYPE_CHECKING:
    from zaya_jax.parallel.peer_liveness import PeerLiveness


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
      The exit status, see `ExitCode`.
    """
    options, process = _parser().parse_intermixed_args(arguments), _Process()
    with Listener(process.stop):
        try:
            config = _config(options)
            if options.print_config:
                print(to_yaml(config), end="")
            elif options.dry_run:
                _dry_run(config, options)
            else:
                _train(config, options, process)
        except (InputError, Preempted, RunStopped, KeyboardInterrupt) as error:
            return process.end(error)
        except Exception as error:
            if is_disk_full(error):
                return process.end(error)
            if process.peers is None:
                raise
            process.fail(error, process.peers)
    return ExitCode.OK


def _train(config: Config, options: argparse.Namespace, process: "_Process") -> None:
    process.run_dir = config.run_dir
    preset = _prepare_jax(config)
    from zaya_jax.parallel.multihost import is_primary, join
    from zaya_jax.train.loop import run_training
    from zaya_jax.train.report import report

    timeout = preset.peer_timeout if options.peer_timeout is None else options.peer_timeout
    process.peers = join(options.coordinator, options.processes, options.process, preset.join_seconds, timeout)
    text = report(config, run_training(config))
    if is_primary():
        print(text)


def _dry_run(config: Config, options: argparse.Namespace) -> None:
    _prepare_jax(config, "cpu")
    from zaya_jax.machine.dry_run.report import dry_run

    print(dry_run(config, options.devices, options.hardware, options.json))


class _Process:
    """How this process ends: with one sentence, which the other processes of its job end with too."""

    def __init__(self) -> None:
        self.run_dir = ""  # of the run that is being trained
        self.peers: PeerLiveness | None = None  # the other processes of the job

    def stop(self, number: int) -> None:
        """Answer a signal that finds nothing to save, or is the second one."""
        leave = say_and_exit if self.peers is None else self.peers.leave
        leave(f"Stopped by {NAMES[number]}.{_saved(self.run_dir)}", exit_status(number))

    def end(self, error: BaseException) -> int:
        """Say why the run ends; the exit status."""
        sentence, status = last_words(error)
        if self.peers is not None:
            self.peers.leave(sentence, status)
        warn(sentence)
        return status

    def fail(self, error: Exception, peers: "PeerLiveness") -> None:
        """End a job of several processes for an error in one of them, which may come of another that is lost."""
        from zaya_jax.parallel.multihost import is_peer_loss

        if is_peer_loss(error):
            peers.wait()  # for the name of the process that is lost, with which this one then ends
        else:
            traceback.print_exc()
        why = (str(error).splitlines() or [type(error).__name__])[0][:300].removesuffix(".")
        peers.leave(f"Stopped: {why}.{_saved(self.run_dir)}", ExitCode.STOPPED)


def _saved(run_dir: str) -> str:
    """What a run that ends at once has saved."""
    if not run_dir:
        return ""
    steps = named_steps(Path(run_dir).expanduser() / CHECKPOINTS)
    if not steps:
        return f" There is no checkpoint in {run_dir}: the same command starts from the first step."
    return f" The newest checkpoint in {run_dir} is that of step {steps[-1]}: the same command resumes from it."


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m zaya_jax.main", description="Train a ZAYA1 model.")
    add = parser.add_argument
    add("--config", required=True, metavar="FILE", help="a configuration, such as configs/tiny.yaml")
    add("--print-config", action="store_true", help="print the resolved configuration and stop")
    add("--dry-run", action="store_true", help="estimate memory and step time of each phase, and train nothing")
    add("--devices", type=int, metavar="N", help="number of devices to simulate (dry run only)")
    add("--hardware", metavar="NAME", help=f"hardware to simulate (dry run only): {', '.join(HARDWARE)}")
    add("--json", action="store_true", help="print the result as JSON (dry run only)")
    add("--coordinator", metavar="HOST:PORT", help="address of process 0 (default: the launcher's)")
    add("--processes", type=int, metavar="N", help="number of processes of the job (default: the launcher's)")
    add("--process", type=int, metavar="I", help="number of this process, from 0 (default: the launcher's)")
    add("--peer-timeout", type=float, metavar="SECONDS", help="stop when another process has been silent for this long "
        "(default: the preset's)")  # fmt: skip
    add("overrides", nargs="*", metavar="section.key=value", help="values that override the file's")
    return parser


def _config(options: argparse.Namespace) -> Config:
    if options.dry_run and options.devices is None:
        raise InputError("--dry-run needs --devices N, the number of devices to simulate.")
    if not options.dry_run and (options.devices is not None or options.hardware is not None or options.json):
        raise InputError("--devices, --hardware and --json work with --dry-run only: add it.")
    if options.peer_timeout is not None and not 0 < options.peer_timeout < float("inf"):
        raise InputError(f"--peer-timeout is {options.peer_timeout:g}, but must be a number of seconds above zero.")
    return load_config(options.config, options.overrides)


def _prepare_jax(config: Config, platform: str | None = None) -> Preset:
    """What must be set before anything is computed."""
    preset = select_preset(config.preset)
    if "jax" not in sys.modules:  # where a program has imported it, XLA may have read its flags
        if platform is None:
            apply_preset(preset)
        else:
            os.environ["JAX_PLATFORMS"] = platform
    import jax

    if config.train.compute_dtype == "float64":
        jax.config.update("jax_enable_x64", True)
    return preset


if __name__ == "__main__":
    sys.exit(main())
