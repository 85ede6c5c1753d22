"""Roll a run back past bad data: to the newest checkpoint before it, and on without its rows."""

import dataclasses
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import NamedTuple

from zaya_jax.aegis.failure import SKIPPED, Failure
from zaya_jax.aegis.training_command import TrainingCommand
from zaya_jax.config.stages import rows_before
from zaya_jax.errors import InputError
from zaya_jax.run.checkpoints import CHECKPOINTS, usable_checkpoints

_TICK = 0.05  # seconds
_LONGEST = 3600.0  # seconds that verifying the checkpoint may take


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

    Raises:
      InputError: the checkpoint is damaged, the run is in use, or `should_stop()` became true.
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
        raise InputError(
            f"The run could not be rolled back to step {plan.step}: {printed or 'the command was stopped.'}"
        )
    return command.without_rows(plan.first, plan.end)
