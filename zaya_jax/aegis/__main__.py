"""`python -m zaya_jax.aegis`: keep a training run alive, and look at what happened to it."""

import argparse
import contextlib
import functools
import json
import os
import random
import secrets
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from zaya_jax.aegis.copies import Copies
from zaya_jax.aegis.drill import Drill, draw_faults, format_card, write_card
from zaya_jax.aegis.exit_codes import SupervisorExit
from zaya_jax.aegis.faults import parse_fault
from zaya_jax.aegis.job_view import format_events, format_job, merge_events
from zaya_jax.aegis.leader import Setup
from zaya_jax.aegis.leader_process import LeaderProcess, leader_address, open_listeners
from zaya_jax.aegis.member import Member, Place
from zaya_jax.aegis.policy import load_policy
from zaya_jax.aegis.state import is_running, read_state
from zaya_jax.aegis.supervision_report import AEGIS, describe_run, format_report, format_status
from zaya_jax.aegis.supervisor import Supervisor
from zaya_jax.aegis.timeouts import check_timeouts
from zaya_jax.aegis.training_command import TrainingCommand, fits, read_command
from zaya_jax.config import load_config
from zaya_jax.config.checks import require
from zaya_jax.config.stages import total_steps
from zaya_jax.errors import ExitCode, InputError, Reason
from zaya_jax.hardware.detection import select_preset
from zaya_jax.run.command_output import prepare_streams, run_command
from zaya_jax.run.digests import digest
from zaya_jax.run.fencing import JOB
from zaya_jax.run.files import Unlockable, expanded, locked
from zaya_jax.run.job_secret import secret_path, share_secret
from zaya_jax.run.options import parse_training
from zaya_jax.run.parser import Parser
from zaya_jax.run.signals import NAMES, warn
from zaya_jax.run.writing import remove_partials

_LEASE = 120.0  # seconds to wait for the lock of a dead supervisor, which an NFSv4 server keeps for 90

_EXAMPLES = """examples:
  python -m zaya_jax.aegis run -- python -m zaya_jax.main --config configs/tiny.yaml
  python -m zaya_jax.aegis run --processes 2 --policy site.yaml -- python -m zaya_jax.main --config configs/tiny.yaml
  python -m zaya_jax.aegis status runs/tiny --follow
  python -m zaya_jax.aegis report runs/tiny
  python -m zaya_jax.aegis export runs/tiny --port 9464
  python -m zaya_jax.aegis drill --folder runs/drill --faults 5 -- --config configs/tiny.yaml"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: of `run` a `SupervisorExit`, of the others an `ExitCode`."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        options = _parser().parse_args(arguments)
        status = run_command(lambda: options.action(options))
    except SystemExit as end:  # of argparse: `--help`, or a flag that does not exist
        status = end.code if isinstance(end.code, int) else ExitCode.OK
    is_run = arguments[:1] == ["run"]
    return SupervisorExit.CONFIGURATION if is_run and status == ExitCode.BAD_INPUT else status


def _run(options: argparse.Namespace) -> int:
    if not options.command:
        example = "python -m zaya_jax.aegis run -- python -m zaya_jax.main --config configs/tiny.yaml"
        raise InputError(f"The command to supervise is missing. Write it after --, as in: {example}")
    if shutil.which(options.command[0]) is None:
        raise InputError(f"The command {options.command[0]} was not found.")
    for flag, value in (("--processes", options.processes), ("--nodes", options.nodes)):
        require(value >= 1, flag, value, "at least 1")
    require(options.spares >= 0, "--spares", options.spares, "at least 0")
    require(options.spares == 0 or options.nodes > 1, "--spares", options.spares, "0 unless --nodes is at least 2")
    least = options.min_nodes
    require(least is None or 1 <= least <= options.nodes, "--min-nodes", least, f"from 1 to --nodes {options.nodes}")
    policy = load_policy(options.policy)
    place = {"nodes": options.nodes, "spares": options.spares, "node": options.node, "coordinator": options.coordinator}
    command = read_command(options.command, options.processes, options.run_dir, **place)
    if command.config is not None:
        preset = select_preset(command.config.preset)
        peer_timeout = preset.peer_timeout if command.peer_timeout is None else command.peer_timeout
        check_timeouts(policy, preset, peer_timeout, os.environ)
    for name, action in vars(policy.rules).items():
        if command.nodes > 1 and action in ("fewer_devices", "roll_back") and name not in policy.log_only:
            needs = f"{action}, which needs one node, but --nodes is {command.nodes}"
            raise InputError(f"rules.{name} is {needs}. List {name} in log_only, or choose another action.")
    node = os.uname().nodename if command.nodes == 1 else f"{os.uname().nodename}-{command.node}"
    folder = command.run_dir / AEGIS / node
    environment = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1", **os.environ}  # a restart compiles nothing
    environment[JOB] = secrets.token_hex(8)
    with contextlib.ExitStack() as stack:
        for number in {signal.SIGTERM, signal.SIGHUP} - {n for n in NAMES if signal.getsignal(n) is signal.SIG_IGN}:
            stack.callback(signal.signal, number, signal.signal(number, _stop_before_start))
        if not _lock(folder, stack):
            return SupervisorExit.RETRY_ELSEWHERE
        join = _join(command, options, node, stack, environment[JOB]) if command.nodes > 1 else None
        return Supervisor(command, policy, folder, node, environment, join).run()


def _stop_before_start(number: int, frame: FrameType | None) -> NoReturn:
    """End with the code on which a scheduler requeues, while the supervisor waits for a lock or an address."""
    del frame
    warn(f"Stopped by {NAMES[number]} before the job started.")
    raise SystemExit(SupervisorExit.PREEMPTED)


def _join(
    command: TrainingCommand, options: argparse.Namespace, node: str, stack: contextlib.ExitStack, name: str
) -> Callable[[int], Member]:
    """Return what joins the job of several nodes; node 0 listens from now on, and has the secret and `name` of the job.

    The processes on node 0, of which one takes the fencing token, have the name in their environment.
    """
    coordinator = command.coordinator or ""
    host, port = leader_address(coordinator)
    patience = float(select_preset(None if command.config is None else command.config.preset).join_seconds)
    argv = digest("\0".join(command.argv).encode(errors="surrogateescape"))
    least = options.min_nodes or command.nodes
    config, here = command.config, len(command.devices)
    smaller = [n for n in range(least, command.nodes) if config is None or fits(config, n * here)]
    if least < command.nodes and not smaller:
        problem = f"no number of nodes from {least} on divides the batches of all phases"
        warn(f"--min-nodes {least} changes nothing: {problem}.")
    job = {"nodes": command.nodes, "spares": options.spares, "min_nodes": least, "smaller": smaller}
    job |= {"processes": here, "command": argv}
    place = Place(command.node, node, host, port, secret_path(command.run_dir, f"{host}:{port}"), job, patience)
    copies = None if config is None else Copies(config)
    if command.node:
        return functools.partial(Member, place, leader=None, copies=copies)
    listeners = [stack.enter_context(each) for each in open_listeners(coordinator, patience)]
    secret = stack.enter_context(share_secret(place.secret))
    setup = Setup(str(command.run_dir / AEGIS), job, patience, name)
    leader = LeaderProcess(listeners, secret, setup)
    return functools.partial(Member, place, leader=leader, copies=copies)


def _lock(folder: Path, stack: contextlib.ExitStack) -> bool:
    """Lock the folder of the supervisor; False if another one that no longer runs has the lock for too long.

    Raises `InputError` if another supervisor runs there, or the folder cannot be written.
    """
    end = time.monotonic() + _LEASE
    while True:
        try:
            with contextlib.suppress(Unlockable):  # training says so
                stack.enter_context(locked(folder / ".lock", "The folder of the supervisor", wait=False))
                remove_partials(folder)
            return True
        except InputError as error:
            if error.reason is not Reason.PEERS_MISSING or is_running(read_state(folder)):
                raise
            if time.monotonic() >= end:
                warn(f"Stopped: {error}")
                return False
            time.sleep(1)


def _status(options: argparse.Namespace) -> int:
    while True:
        job = format_job(options.path)
        print(*([job] if job else []), format_status(options.path), sep="\n", flush=True)
        if not options.follow:
            return ExitCode.OK
        time.sleep(2)


def _events(options: argparse.Namespace) -> int:
    print(json.dumps(merge_events(options.path)) if options.json else format_events(options.path))
    return ExitCode.OK


def _report(options: argparse.Namespace) -> int:
    print(json.dumps(describe_run(options.path), indent=1) if options.json else format_report(options.path))
    return ExitCode.OK


def _export(options: argparse.Namespace) -> int:
    try:
        from zaya_jax.aegis.exporter import serve
    except ImportError as error:
        raise InputError("Serving metrics requires prometheus_client: pip install 'zaya-jax[aegis]'.") from error
    serve(options.path, options.address, options.port)
    return ExitCode.OK


def _drill(options: argparse.Namespace) -> int:
    trainer = parse_training(options.trainer)
    config = load_config(trainer.config, trainer.overrides)
    if options.processes < 1 or options.faults < 1:
        raise InputError("--processes and --faults must be at least 1.")
    run = total_steps(config), config.checkpoint.every, random.Random(options.seed)
    faults = [parse_fault(text) for text in options.fault] or draw_faults(options.faults, options.processes, *run)
    drill = Drill(Path(options.folder), options.trainer, options.processes, faults, options.hang_seconds)
    card = drill.run(lambda sentence: print(sentence, flush=True))
    print(format_card(card))
    if options.output is not None:
        write_card(card, Path(options.output), "python -m zaya_jax.aegis " + shlex.join(sys.argv[1:]))
    healthy = card["identical"] and card["made"] == card["faults"] and not card["false_alarms"]
    return ExitCode.OK if healthy else ExitCode.STOPPED


def _parser() -> Parser:
    parser = Parser(prog="python -m zaya_jax.aegis", description="Keep a training run alive.", epilog=_EXAMPLES)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="start a training command, and restart it when it fails")
    run.set_defaults(action=_run)
    run.add_argument("--policy", metavar="FILE", help="policy to follow (default: see configs/aegis/default.yaml)")
    run.add_argument("--run-dir", metavar="DIR", help="run folder (default: that of the training command)")
    several = "with more than one, each gets --coordinator, --processes and --process (default: 1)"
    _add_number(run, "--processes", 1, f"processes to start on this machine; {several}")
    _add_number(run, "--nodes", 1, "nodes of the job, each with its own supervisor and as many processes (default: 1)")
    _add_number(run, "--spares", 0, "further nodes that wait until they replace one that is lost (default: 0)")
    text = "continue on fewer nodes, but at least N, when no spare is left, and on more again when nodes return"
    run.add_argument("--min-nodes", type=int, metavar="N", help=f"{text} (default: that of --nodes)")
    launcher = "(default: set by Slurm or Kubernetes)"
    run.add_argument("--node", type=int, metavar="I", help=f"index of this node, from 0 {launcher}")
    run.add_argument("--coordinator", metavar="HOST:PORT", help="address of process 0 (several nodes only)")
    run.add_argument("command", nargs="*", metavar="-- COMMAND", help="the training command")
    drill = commands.add_parser("drill", help="make faults in a small run, and score how they are dealt with")
    drill.set_defaults(action=_drill)
    drill.add_argument("--folder", required=True, metavar="DIR", help="new folder for the drill")
    _add_number(drill, "--processes", 2, "processes of the run (default: 2)")
    _add_number(drill, "--faults", 10, "number of random faults (default: 10)")
    form, instead = "FAULT@PROCESS:STEP:PHASE", "make this fault in place of random ones; repeat it for more"
    drill.add_argument("--fault", action="append", default=[], metavar=form, help=instead)
    timeout = "timeout of the phases of a step (default: 10)"
    drill.add_argument("--hang-seconds", type=float, default=10.0, metavar="SECONDS", help=timeout)
    _add_number(drill, "--seed", 0, "seed of the faults (default: 0)")
    drill.add_argument("--output", metavar="FILE", help="write the score-card as JSON")
    drill.add_argument("trainer", nargs="*", metavar="-- ARGUMENTS", help="arguments of zaya_jax.main")
    status = _add_reader(commands, "status", _status, "print what the processes of a supervised run do now")
    status.add_argument("--follow", action="store_true", help="print again every two seconds")
    report = _add_reader(commands, "report", _report, "print the faults, recoveries and goodput of a run")
    report.add_argument("--json", action="store_true", help="print JSON")
    events = _add_reader(commands, "events", _events, "print the events of all nodes, each with its cause")
    events.add_argument("--json", action="store_true", help="print JSON")
    export = _add_reader(commands, "export", _export, "serve a live page of a run, and its metrics to Prometheus")
    _add_number(export, "--port", 9464, "port to listen on (default: 9464)")
    warning = "The server neither encrypts nor authenticates: with another address, TLS and the firewall are up to you"
    address = f"address to listen on (default: 127.0.0.1). {warning}"
    export.add_argument("--address", default="127.0.0.1", metavar="ADDRESS", help=address)
    return parser


def _add_number(parser: argparse.ArgumentParser, flag: str, default: int, text: str) -> None:
    parser.add_argument(flag, type=int, default=default, metavar="N", help=text)


def _add_reader(commands: Any, name: str, action: Callable[..., int], text: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text)
    parser.set_defaults(action=action)
    parser.add_argument("path", type=expanded, metavar="RUN_DIR", help="folder of the run")
    return parser


if __name__ == "__main__":
    prepare_streams()
    sys.exit(main())
