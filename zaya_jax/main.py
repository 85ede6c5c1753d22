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

if TYPE_CHECKING:
    from zaya_jax.parallel.peer_liveness import PeerLiveness


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
      The exit status, see `ExitCode`.
    """
    given, watch, run_dir = _parser().parse_intermixed_args(arguments), None, ""

    def stop(number: int) -> None:
        """Answer a signal that finds nothing to save, or is the second one."""
        sentence, status = f"Stopped by {NAMES[number]}.{_saved(run_dir)}", exit_status(number)
        (say_and_exit if watch is None else watch.leave)(sentence, status)

    listener = Listener(stop).__enter__()
    try:
        config = _checked(given)
        if given.print_config:
            print(to_yaml(config), end="")
            return ExitCode.OK
        if given.dry_run:
            _prepare_jax(config, "cpu")
            from zaya_jax.machine.dry_run.report import dry_run

            print(dry_run(config, given.devices, given.hardware, given.json))
            return ExitCode.OK
        run_dir = config.run_dir
        preset = _prepare_jax(config)
        from zaya_jax.parallel.multihost import is_primary, join
        from zaya_jax.train.loop import run_training
        from zaya_jax.train.report import report

        timeout = preset.peer_timeout if given.peer_timeout is None else given.peer_timeout
        watch = join(given.coordinator, given.processes, given.process, preset.join_seconds, timeout)
        text = report(config, run_training(config))
        if is_primary():
            print(text)
    except (InputError, Preempted, RunStopped, KeyboardInterrupt) as error:
        return _end(watch, error)
    except Exception as error:
        if is_disk_full(error):
            return _end(watch, error)
        if watch is None:
            raise
        from zaya_jax.parallel.multihost import lost

        if lost(error):
            watch.wait()  # for the name of the process that is lost, with which this one then ends
        else:
            traceback.print_exc()
        why = (str(error).splitlines() or [type(error).__name__])[0][:300].removesuffix(".")
        watch.leave(f"Stopped: {why}.{_saved(run_dir)}", ExitCode.STOPPED)
    finally:
        listener.__exit__()
    return ExitCode.OK


def _end(watch: "PeerLiveness | None", error: BaseException) -> int:
    sentence, status = last_words(error)
    if watch is not None:
        watch.leave(sentence, status)
    warn(sentence)
    return status


def _saved(run_dir: str) -> str:
    """What a run that ends at once has saved; nothing is imported for it, since another import may be under way."""
    if not run_dir:
        return ""
    try:
        steps = [int(name) for name in os.listdir(Path(run_dir).expanduser() / "checkpoints") if name.isdecimal()]
    except OSError:
        steps = []
    if not steps:
        return f" There is no checkpoint in {run_dir}: the same command starts from the first step."
    return f" The newest checkpoint in {run_dir} is that of step {max(steps)}: the same command resumes from it."


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m zaya_jax.main", description="Train a ZAYA1 model.")
    add = parser.add_argument
    add("--config", required=True, metavar="FILE", help="a configuration, such as configs/tiny.yaml")
    add("--print-config", action="store_true", help="print the resolved configuration and stop")
    add("--dry-run", action="store_true", help="say what each phase takes of its devices, train nothing")
    add("--devices", type=int, metavar="N", help="of the dry run")
    add("--hardware", metavar="NAME", help=f"of the dry run: {', '.join(HARDWARE)}")
    add("--json", action="store_true", help="the dry run as JSON")
    add(
        "--coordinator", metavar="HOST:PORT", help="process 0 of a job of several; Slurm and Open MPI say it themselves"
    )
    add("--processes", type=int, metavar="N", help="of the job")
    add("--process", type=int, metavar="I", help="this one's number, from 0")
    add("--peer-timeout", type=float, metavar="SECONDS", help="stop when another process has been silent for this long "
        "(default: the preset's)")  # fmt: skip
    add("overrides", nargs="*", metavar="section.key=value", help="values that override the file's")
    return parser


def _checked(given: argparse.Namespace) -> Config:
    if given.dry_run and given.devices is None:
        raise InputError("--dry-run wants --devices N, the number of devices of the job.")
    if not given.dry_run and (given.devices is not None or given.hardware is not None or given.json):
        raise InputError("--devices, --hardware and --json are of the dry run: give --dry-run too.")
    if given.peer_timeout is not None and not 0 < given.peer_timeout < float("inf"):
        raise InputError(f"--peer-timeout is {given.peer_timeout:g}, but must be a number of seconds above zero.")
    return load_config(given.config, given.overrides)


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
