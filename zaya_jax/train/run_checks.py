"""Whether a run may resume with another configuration: it must agree on the steps that are done."""

from typing import Any

import jax
import numpy as np

from zaya_jax.config import Config, PhaseConfig, to_dict
from zaya_jax.config.checks import shown
from zaya_jax.config.stages import phase_steps, schedule_spans, stage_at, stages, tokens_before
from zaya_jax.errors import InputError
from zaya_jax.optim.schedule import learning_rate_factor


def check_past(old: Config, new: Config, step: int, *, rates: bool = True) -> None:
    """Raise `InputError` where `new` has other batches or rates than `old` in the first `step` steps.

    Args:
      old: of the run so far.
      new: to resume with. A phase may be as long as it likes once what is done fits into it.
      step: steps done.
      rates: whether learning rates must have been the same, too.
    """
    begun = sum(first < step for first, _ in phase_steps(old))
    for index, phase in enumerate(old.phases[:begun]):
        where = f"phases.{phase.name}"
        if index >= len(new.phases):
            raise InputError(f"{where} is gone, but the run is past its beginning; put it back, or choose another "
                             "run_dir.")  # fmt: skip
        before, now = _fixed(phase), _fixed(new.phases[index])
        if index < begun - 1:
            before["tokens"], now["tokens"] = phase.tokens, new.phases[index].tokens
        for key, value in before.items():
            if value != now[key]:
                raise InputError(
                    f"{where}.{key} was {shown(value)} and is now {shown(now[key])}, but the run has started that "
                    "phase. Restore the old value to resume that run, or choose another run_dir."
                )
    if _steps_done(old, step) != _steps_done(new, step):
        where, budget = f"phases.{old.phases[begun - 1].name}", new.phases[begun - 1].tokens
        done = tokens_before(old, step) - tokens_before(old, phase_steps(old)[begun - 1][0])
        if budget < done:
            raise InputError(f"{where}.tokens is {budget:,}, but {done:,} tokens of that phase are done; take at least "
                             "as many.")  # fmt: skip
        raise InputError(f"The batch (train.batch) or the context (data.context) was another in the {step} steps that "
                         "are done. Restore the old values; a new phase may have others.")  # fmt: skip
    if rates:
        _check_rates(old, new, step, begun)


def _check_rates(old: Config, new: Config, step: int, begun: int) -> None:
    """Raise `InputError` where the learning rate of a step that is done would have been another."""
    spans, now = schedule_spans(old)[:begun], schedule_spans(new)[:begun]
    if spans == now:
        return
    differing = np.flatnonzero(_factors(old, step) != _factors(new, step))
    if not differing.size:
        return
    first = int(differing[0])
    phase = stage_at(old, first).phase
    was, becomes = spans[phase], now[phase]
    what = f"spanned {was.tokens:,} tokens and now spans {becomes.tokens:,}"
    if was.schedule != becomes.schedule:
        before, after = to_dict(was.schedule), to_dict(becomes.schedule)
        what = " and ".join(f"had {key} {shown(value)} and now has {shown(after[key])}"
                            for key, value in before.items() if value != after[key])  # fmt: skip
    raise InputError(
        f"phases.{old.phases[phase].name}: the {was.schedule.shape} schedule {what}, so steps {first + 1} to {step}, "
        "which are done, would have had other learning rates. Restore the old values and append a phase with a "
        f"schedule of its own; or continue at the new rates in a new run_dir with resume_from={new.run_dir} (up to "
        f"step {first} both schedules have the same rates: {new.run_dir}/checkpoints/STEP)."
    )


def _factors(config: Config, steps: int) -> np.ndarray:
    """The learning-rate factor of each of the first `steps` steps."""
    return jax.device_get(jax.jit(jax.vmap(learning_rate_factor(config)))(np.arange(steps, dtype=np.int32)))


def _steps_done(config: Config, step: int) -> list[tuple[int, ...]]:
    """Phase, first step, end, context and sequences of each stage in the first `step` steps."""
    return [(stage.phase, stage.first_step, min(stage.end, step), stage.context, stage.sequences)
            for stage in stages(config) if stage.first_step < step]  # fmt: skip


def _fixed(phase: PhaseConfig) -> dict[str, Any]:
    """What of a phase may not change once it is begun; that lengths and rates fit is seen from the steps themselves."""
    free = ("parallel", "remat", "tokens", "schedule")
    settings = {key: value for key, value in to_dict(phase).items() if key not in free}
    if settings["batch"] is not None:
        settings["batch"] = {key: value for key, value in settings["batch"].items() if key != "micro"}
    return settings
