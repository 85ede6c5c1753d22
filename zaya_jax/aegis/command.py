"""The command that a supervisor runs, and how it changes between attempts: fewer devices, rows of data to skip."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from zaya_jax.config import Config, load_config
from zaya_jax.config.stages import stages
from zaya_jax.errors import InputError
from zaya_jax.run.folder import CONFIG, read_config
from zaya_jax.run.options import training_parser

MODULE = "zaya_jax.main"
_ROWS = "data.skip_rows"


@dataclasses.dataclass(frozen=True)
class TrainingCommand:
    """A command and its processes on this node.

    Attributes:
      argv: the command, without a shell.
      run_dir: folder of the run.
      devices: index of the device of each process; a single process uses all of them.
      config: configuration of the run; None if the command is not `python -m zaya_jax.main`.
      peer_timeout: value of --peer-timeout; None if it is not set.
      skipped_rows: ranges of rows that the supervisor has decided to skip.
    """

    argv: tuple[str, ...]
    run_dir: Path
    devices: tuple[int, ...] = (0,)
    config: Config | None = None
    peer_timeout: float | None = None
    skipped_rows: tuple[tuple[int, int], ...] = ()

    def processes(self, coordinator: str) -> list[tuple[list[str], dict[str, str]]]:
        """Return the command and the variables of each process; several meet at the address `coordinator`."""
        argv, count = [*self.argv, *self._overrides()], len(self.devices)
        if self.devices == (0,):
            return [(argv, {})]
        job = [["--coordinator", coordinator, "--processes", str(count), "--process", str(index)] if count > 1 else []
               for index in range(count)]  # fmt: skip
        return [([*argv, *flags], {"JAX_LOCAL_DEVICE_IDS": str(device)})
                for flags, device in zip(job, self.devices, strict=True)]  # fmt: skip

    def with_fewer_devices(self, lost: int | None) -> Self | None:
        """Return the command without the device `lost` (the last, if None), on as many others as its batches allow.

        Returns:
          None if there is no such number, or this is not a training command.
        """
        if self.config is None:
            return None
        kept = [device for device in self.devices if device != lost]
        kept = kept[:-1] if len(kept) == len(self.devices) else kept
        for count in range(len(kept), 0, -1):
            if fits(self.config, count):
                return dataclasses.replace(self, devices=tuple(kept[:count]))
        return None

    def without_rows(self, first: int, end: int) -> Self:
        """Return the command with the rows `first` to `end` - 1 skipped, too."""
        return dataclasses.replace(self, skipped_rows=_merged([*self.skipped_rows, (first, end)]))

    def _overrides(self) -> list[str]:
        """Return the rows to skip as an override, with those that an earlier supervisor of this run recorded."""
        if self.config is None:
            return []
        recorded: list[Any] = []
        if (self.run_dir / CONFIG).exists():
            recorded = read_config(self.run_dir).get("data", {}).get("skip_rows", [])
        ours = [tuple(rows) for rows in [*to_rows(self.config), *recorded]]
        rows = _merged([*ours, *self.skipped_rows])
        return [] if rows == _merged(to_rows(self.config)) else [f"{_ROWS}={json.dumps(rows)}"]


def to_rows(config: Config) -> list[tuple[int, int]]:
    """Return the rows that a configuration skips."""
    return [(rows[0], rows[1]) for rows in config.data.skip_rows]


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
        phase = config.phases[stage.phase]
        layout, micro_batch = config.parallel_for(phase), config.batch_for(phase).micro_batch or 1
        others = layout.fsdp * layout.expert * layout.context
        if devices % others or layout.data not in (None, devices // others):
            return False
        if stage.sequences % (micro_batch * devices // layout.context):
            return False
    return True


def read_command(argv: Sequence[str], processes: int, run_dir: str | None) -> TrainingCommand:
    """Read a command, and check its configuration if it is a training command.

    Args:
      argv: the command.
      processes: number of processes on this node.
      run_dir: value of --run-dir; None to use that of the training command.

    Raises:
      InputError: the configuration is invalid, or there is no run folder.
    """
    devices = tuple(range(processes))
    if MODULE not in argv:
        if run_dir is None:
            raise InputError(f"--run-dir is missing. It can be left out only if the command contains -m {MODULE}.")
        return TrainingCommand(tuple(argv), Path(run_dir).expanduser(), devices)
    options = training_parser().parse_intermixed_args(list(argv[argv.index(MODULE) + 1 :]))
    if processes > 1 and (options.coordinator, options.processes, options.process) != (None, None, None):
        raise InputError(f"--processes {processes} of the supervisor sets --coordinator, --processes and --process of "
                         "each process. Remove them from the command.")  # fmt: skip
    config = load_config(options.config, options.overrides)
    folder = Path(config.run_dir if run_dir is None else run_dir).expanduser()
    return TrainingCommand(tuple(argv), folder, devices, config, options.peer_timeout)
