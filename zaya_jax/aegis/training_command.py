"""The command that a supervisor runs, and how it changes between attempts: fewer devices, rows of data to skip."""

import dataclasses
import json
import math
import os
import re
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Self

from zaya_jax.aegis.failure import SKIPPED, Failure
from zaya_jax.config import Config, from_dict, load_config
from zaya_jax.config.parallel import BATCH_AXES, axis_sizes
from zaya_jax.config.stages import micro_batch, rows_before, stages, total_steps
from zaya_jax.errors import InputError
from zaya_jax.run.checkpoints import CHECKPOINTS, saved_steps, usable_checkpoints
from zaya_jax.run.files import expanded
from zaya_jax.run.folder import CONFIG, read_config
from zaya_jax.run.job_secret import SECRET_BYTES, VARIABLE
from zaya_jax.run.launcher import RANKS, node_index
from zaya_jax.run.options import parse_training
from zaya_jax.run.patience import ended_early

_TRAINING = (("zaya_jax.main",), ("zaya_jax", "train"), ("zaya", "train"))  # how a training command can be written
_TICK = 0.05  # seconds
_LONGEST = 3600.0  # seconds that verifying the checkpoint may take
_NAMES_TRAINER = r"zaya_jax\.main|zaya(_jax)? train"


@dataclasses.dataclass(frozen=True)
class TrainingCommand:
    """A command and its processes on this node."""

    argv: tuple[str, ...]  # the command, without a shell
    run_dir: Path  # folder of the run
    # Index of the device of each process on this node; a single process uses all of them.
    devices: tuple[int, ...] = (0,)
    nodes: int = 1  # number of nodes of the job; each runs as many processes
    node: int = 0  # rank of this node in the job; before it has one, its index
    coordinator: str | None = None  # HOST:PORT of process 0; None if it is on this node, at a free port
    config: Config | None = None  # configuration of the run; None if the command is not `python -m zaya_jax.main`
    secret: str | None = None  # that the processes of all nodes share; None for a new one
    peer_timeout: float | None = None  # value of --peer-timeout; None if it is not set
    is_reduced: bool = False  # whether devices were left out
    skipped_rows: tuple[tuple[int, int], ...] = ()  # ranges of rows that the supervisor has decided to skip

    def processes(self, address: str) -> list[tuple[list[str], dict[str, str]]]:
        """Return the command and the variables of each process; without `coordinator` several connect at `address`."""
        argv, here, count = list(self.argv), len(self.devices), self.nodes * len(self.devices)
        rows = self.rows_to_skip()  # with those that an earlier supervisor of this run recorded
        if self.config is not None and rows != self.config.data.skip_rows:
            argv.append(f"data.skip_rows={json.dumps(rows)}")
        if here == 1 and self.nodes == 1:  # jax then uses all devices that it sees
            device = str(self.devices[0])
            visible = {"HIP_VISIBLE_DEVICES": device, "CUDA_VISIBLE_DEVICES": device}
            return [(argv, visible if self.is_reduced else {})]
        secret = {VARIABLE: self.secret or secrets.token_hex(SECRET_BYTES)}
        listed = []
        for index, device in enumerate(self.devices):
            job = ["--coordinator", self.coordinator or address, "--processes", str(count), "--process"]
            flags = [*job, str(self.node * here + index)] if count > 1 else []
            listed.append(([*argv, *flags], {"JAX_LOCAL_DEVICE_IDS": str(device), **secret}))
        return listed

    def preflight(self) -> tuple[list[str], dict[str, str]]:
        """Return the command, and its variables, that checks the devices of this node for a training command."""
        options = parse_training(_training_arguments(self.argv) or ())
        alone = ["env", *(f"-u{name}" for name in RANKS)]  # as a process of no job
        check = [sys.executable, "-m", "zaya_jax.machine", "preflight", str(options.config), *options.overrides]
        return [*alone, *check, "measurements=null"], {}  # which are of the whole job

    def with_fewer_devices(self, lost: int | None) -> Self | None:
        """Return the command without the device `lost` (the last, if None), on as many others as its batches allow.

        None if there is no such number, other nodes would have to agree, or this is not a training command.
        """
        if self.config is None or self.nodes > 1:
            return None
        kept = [device for device in self.devices if device != lost]
        kept = kept[:-1] if len(kept) == len(self.devices) else kept
        for count in range(len(kept), 0, -1):
            if fits(self.config, count):
                return dataclasses.replace(self, devices=tuple(kept[:count]), is_reduced=True)
        return None

    @property
    def names_trainer(self) -> bool:
        """True if the command trains, or one of its words does, such as a line of shell: then a trainer must start."""
        return self.config is not None or re.search(_NAMES_TRAINER, "\0".join(self.argv)) is not None

    def is_saved(self) -> bool:
        """Return whether the checkpoint with which the run ends is saved, as far as this node can tell."""
        if self.node:  # process 0 saves, and another node may see its files late
            return True
        folder = self.run_dir if self.config is None else expanded(self.config.run_dir)
        try:
            config = self.config or from_dict(read_config(folder))
        except InputError:  # of another command, or in a folder that this one does not know
            return True
        checkpoints = folder / CHECKPOINTS
        return total_steps(config) in saved_steps(checkpoints) or ended_early(checkpoints, config)

    def rows_to_skip(self) -> tuple[tuple[int, int], ...]:
        """Return the rows to skip: of the configuration, of the run so far, and what the supervisor has added."""
        if self.config is None:
            return ()
        recorded: list[list[int]] = []
        if (self.run_dir / CONFIG).exists():
            recorded = read_config(self.run_dir).get("data", {}).get("skip_rows", [])
        return _merged([*self.config.data.skip_rows, *((first, end) for first, end in recorded), *self.skipped_rows])


def _merged(ranges: Sequence[tuple[int, ...]]) -> tuple[tuple[int, int], ...]:
    """Return sorted ranges without overlap; those that touch stay apart, since a run may not change past ones."""
    merged: list[tuple[int, int]] = []
    for first, end in sorted(ranges):
        if merged and first < merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((first, end))
    return tuple(merged)


def fits(config: Config, devices: int) -> bool:
    """Return whether the batches and layouts of all phases fit that number of devices."""
    for stage in stages(config):
        try:
            sizes = axis_sizes(config.parallel_for(config.phases[stage.phase]), devices)
        except InputError:
            return False
        shards = math.prod(sizes[axis] for axis in BATCH_AXES)
        if stage.sequences % (shards * micro_batch(config, stage, shards)):
            return False
    return True


def read_command(
    argv: Sequence[str],
    processes: int,
    run_dir: str | None,
    *,
    nodes: int = 1,
    spares: int = 0,
    node: int | None = None,
    coordinator: str | None = None,
    environment: Mapping[str, str] = os.environ,
) -> TrainingCommand:
    """Read a command with so many `processes` on each node, and check its configuration if it is a training command.

    Without `run_dir`, the folder is that of the training command; without `node`, the launcher tells it in
    `environment`. Raises `InputError` if the configuration is invalid, or a flag is missing.
    """
    node = node_index(environment) if node is None else node
    if nodes > 1 and (coordinator is None or node is None or not 0 <= node < nodes + spares):
        index = f"--node from 0 to {nodes + spares - 1} where neither Slurm nor Kubernetes sets it"
        raise InputError(f"--nodes {nodes} needs --coordinator HOST:PORT, and {index}.")
    if nodes == 1:
        node = coordinator = None
    devices, arguments = tuple(range(processes)), _training_arguments(argv)
    if arguments is None:
        if run_dir is None:
            alone = "if the command is zaya train or contains -m zaya_jax.main"
            raise InputError(f"--run-dir is missing. It can be left out only {alone}.")
        return TrainingCommand(tuple(argv), expanded(run_dir), devices, nodes, node or 0, coordinator)
    options = parse_training(arguments)
    if (options.coordinator, options.processes, options.process) != (None, None, None):
        advice = "Remove them from the command, and set --processes and --nodes before --."
        raise InputError(f"The supervisor sets --coordinator, --processes and --process of each process. {advice}")
    config = load_config(options.config, options.overrides)
    folder = expanded(config.run_dir if run_dir is None else run_dir)
    job = devices, nodes, node or 0, coordinator
    return TrainingCommand(tuple(argv), folder, *job, config, peer_timeout=options.peer_timeout)


def _training_arguments(argv: Sequence[str]) -> Sequence[str] | None:
    names = [Path(text).name.removeprefix("-m") for text in argv]  # python takes -mMODULE, too
    for words in _TRAINING:
        for place in range(len(names) - len(words) + 1):
            if tuple(names[place : place + len(words)]) == words:
                return argv[place + len(words) :]
    return None


class Rollback(NamedTuple):
    """A roll-back."""

    step: int  # of the checkpoint to resume from
    first: int  # first row of the data to skip
    end: int  # the row after the last one


def plan_rollback(command: TrainingCommand, failure: Failure) -> Rollback | None:
    """Plan to undo the steps before a failure that were bad: as many as were skipped, or all since the last good one.

    None if the rows of the steps are not known, or no checkpoint is old enough.
    """
    if command.config is None:
        return None
    skipped = command.config.train.max_skipped_steps if failure.code == SKIPPED else 0
    last_good = max(failure.step - skipped, 0)
    steps = [each.step for each in usable_checkpoints(command.run_dir / CHECKPOINTS) if each.step <= last_good]
    if not steps or failure.progress <= last_good:
        return None
    rows = command.rows_to_skip()
    config = dataclasses.replace(command.config, data=dataclasses.replace(command.config.data, skip_rows=rows))
    return Rollback(max(steps), rows_before(config, last_good), rows_before(config, failure.progress))


def roll_back(command: TrainingCommand, plan: Rollback, should_stop: Callable[[], bool]) -> TrainingCommand:
    """Quarantine the later checkpoints, and return the command that skips the rows.

    Raises `InputError` if the checkpoint is damaged, the run is in use, or `should_stop()` became true.
    """
    argv = [sys.executable, "-m", "zaya_jax.checkpoint", "rollback", str(command.run_dir), str(plan.step)]
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(argv, stdout=output, stderr=output)  # noqa: S603 (an argument list, without a shell)
        deadline = time.monotonic() + _LONGEST
        while process.poll() is None:
            if should_stop() or time.monotonic() > deadline:
                process.kill()
            time.sleep(_TICK)
        output.seek(0)
        printed = output.read(4096).decode(errors="replace").strip()
    if process.returncode:
        reason = printed or "the command was stopped."
        raise InputError(f"The run could not be rolled back to step {plan.step}: {reason}")
    return dataclasses.replace(command, skipped_rows=(*command.skipped_rows, (plan.first, plan.end)))
