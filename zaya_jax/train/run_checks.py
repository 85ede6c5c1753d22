"""Check that weights fit a configuration, and that a changed configuration does not alter steps already done."""

import bisect
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from zaya_jax.config import Config, ModelConfig, PhaseConfig, flatten_keys, to_dict
from zaya_jax.config.checks import shown
from zaya_jax.config.stages import phase_steps, rows_before, schedule_spans, stage_at, stages, tokens_before
from zaya_jax.errors import InputError
from zaya_jax.job.multihost import is_primary
from zaya_jax.optim.schedule import learning_rate_factor
from zaya_jax.run.checkpoints import CHECKPOINTS, usable_checkpoints
from zaya_jax.run.files import expanded

# Architecture keys that no parameter depends on, so that a longer context can start from a shorter one's state.
_FREE_SIZES = ("max_positions", "rope_base", "sliding_rope_base", "init_std")
# Besides the architecture, the optimizer state depends on these keys.
OPTIMIZER_KEYS = ("optimizer.matrices", "optimizer.muon.momentum_form", "optimizer.balance.rule")


def check_architecture(theirs: ModelConfig, ours: ModelConfig, subject: str, advice: str) -> None:
    """Raise `InputError`, from `subject` to `advice`, if weights have other parameters than this configuration."""
    here, there = _comparable(ours), _comparable(theirs)
    keys = [key for key in there if there[key] != here[key]]
    if keys:
        each = (f"model.{key}={shown(there[key])} (this configuration has {shown(here[key])})" for key in keys)
        same = "the same value" if len(keys) == 1 else "the same values"
        raise InputError(f"{subject} has a different architecture: {', '.join(each)}. Set {same}, or {advice}.")


def _comparable(model: ModelConfig) -> dict[str, Any]:
    """Return the keys that parameters depend on, with the shortest layer pattern, and no window if no layer slides."""
    window = model.sliding_window if "sliding" in model.period else None
    keys = to_dict(dataclasses.replace(model, layer_pattern=model.period, sliding_window=window))
    return {key: value for key, value in keys.items() if key not in _FREE_SIZES}


def check_values(config: Config, other: dict[str, Any], subject: str, keys: Sequence[str], advice: str) -> None:
    """Raise `InputError` if one of `keys` differs in `other`, the configuration that `subject` was made with."""
    here, there = dict(flatten_keys(to_dict(config))), dict(flatten_keys(other))
    for key in keys:
        theirs, ours = there.get(key), here.get(key)
        if theirs != ours:
            values = f"{shown(theirs)}, but this configuration has {shown(ours)}"
            raise InputError(f"{subject} was made with {key}={values}. {advice}.")


def warn_about_positions(config: Config, theirs: ModelConfig, subject: str, phase: int) -> None:
    """Print a warning if the weights `subject` were trained with another RoPE base than a phase, by its index, has."""
    own = config.phases[phase]
    ours, key = config.model_for(own), "model.rope_base" if own.rope_base is None else f"phases.{own.name}.rope_base"
    pairs = [(key, theirs.rope_base, ours.rope_base)]
    if "sliding" in ours.period:
        pairs.append(("model.sliding_rope_base", theirs.sliding_rope_base, ours.sliding_rope_base))
    for key, before, now in pairs:
        if before != now and is_primary():
            advice = f"Set {key}={before:g}, unless you are extending the context."
            print(f"Warning: {subject} was trained with a RoPE base of {before:g}, but {key} is {now:g}. {advice}")


def check_past(old: Config, new: Config, step: int, *, rates: bool = True) -> None:
    """Raise `InputError` if `new` has other batches, rows or learning rates than `old` in the first `step` steps.

    A phase may change its length, as long as the steps done fit into it. `rates=False` skips the learning rates.
    """
    phases_started = sum(first < step for first, _ in phase_steps(old))
    for index, phase in enumerate(old.phases[:phases_started]):
        phase_key = f"phases.{phase.name}"
        if index >= len(new.phases):
            advice = "Restore it, or choose another run_dir."
            raise InputError(f"{phase_key} was removed, but the run has started that phase. {advice}")
        old_settings, new_settings = _fixed_settings(phase), _fixed_settings(new.phases[index])
        if index < phases_started - 1:
            old_settings["tokens"], new_settings["tokens"] = phase.tokens, new.phases[index].tokens
        for key, value in old_settings.items():
            if value != new_settings[key]:
                change = f"was {shown(value)} and is now {shown(new_settings[key])}, but the run has started that phase"
                advice = "Restore the old value to resume the run, or choose another run_dir."
                raise InputError(f"{phase_key}.{key} {change}. {advice}")
    if _steps_done(old, step) != _steps_done(new, step):
        phase_key, budget = f"phases.{old.phases[phases_started - 1].name}", new.phases[phases_started - 1].tokens
        tokens_done = tokens_before(old, step) - tokens_before(old, phase_steps(old)[phases_started - 1][0])
        if budget < tokens_done:
            done = f"the run has already trained on {tokens_done:,} tokens in that phase"
            raise InputError(f"{phase_key}.tokens is {budget:,}, but {done}. Set it to at least that number.")
        done = f"{step} steps have already used the old values"
        advice = "Restore them, or append a phase with the new ones."
        raise InputError(f"train.batch or data.context was changed, but {done}. {advice}")
    _check_skipped_rows(old, new, step)
    if rates:
        _check_rates(old, new, step, phases_started)


def _check_skipped_rows(old: Config, new: Config, step: int) -> None:
    """Raise `InputError` if `data.skip_rows` changes among the rows up to the last one of the steps done."""
    unread = rows_before(old, step)
    past, new_past = ([ends for ends in config.data.skip_rows if ends[0] < unread] for config in (old, new))
    if past == new_past:
        return
    first, end = min(set(past).symmetric_difference(new_past))
    newest = bisect.bisect_right(range(step), first, key=lambda index: rows_before(old, index)) - 1
    change = "has the new range" if (first, end) in new_past else "no longer has the range"
    ways = "in this run_dir with python -m zaya_jax.checkpoint rollback RUN_DIR STEP, in a new one with resume_from="
    earlier = f"go back to a checkpoint of step {newest} or earlier: {ways}RUN_DIR/checkpoints/STEP."
    past_start = f"is past its start: the first unread row is {unread}"
    advice = f"Restore the old value, or {earlier if newest else 'start a new run_dir.'}"
    change = f"{change} [{first}, {end}]"
    raise InputError(f"data.skip_rows {change}, but the checkpoint at step {step} {past_start}. {advice}")


def _check_rates(old: Config, new: Config, step: int, phases_started: int) -> None:
    """Raise `InputError` if the new schedule gives a step already done another learning rate."""
    spans, new_spans = schedule_spans(old)[:phases_started], schedule_spans(new)[:phases_started]
    if spans == new_spans or not (differing := np.flatnonzero(_factors(old, step) != _factors(new, step))).size:
        return
    first = int(differing[0])
    phase = stage_at(old, first).phase
    was, becomes = spans[phase], new_spans[phase]
    change = f"spanned {was.tokens:,} tokens and now spans {becomes.tokens:,}"
    if was.schedule != becomes.schedule:
        old_schedule, new_schedule = to_dict(was.schedule), to_dict(becomes.schedule)
        keys = [key for key, value in old_schedule.items() if value != new_schedule[key]]
        pairs = ((key, shown(old_schedule[key]), shown(new_schedule[key])) for key in keys)
        change = " and ".join(f"had {key} {old_value} and now has {new_value}" for key, old_value, new_value in pairs)
    agreeing = [saved.step for saved in usable_checkpoints(expanded(new.run_dir) / CHECKPOINTS) if saved.step <= first]
    source = f"{new.run_dir}/{CHECKPOINTS}/{agreeing[-1]}" if agreeing else ""
    other = f"continue in a new run_dir with resume_from={source}" if agreeing else "start anew in another run_dir"
    steps = f"step {step} has" if first + 1 == step else f"steps {first + 1} to {step} have"
    advice = f"Either restore the old values and append a phase with its own schedule, or {other}."
    problem = f"phases.{old.phases[phase].name}: the {was.schedule.shape} schedule {change}"
    raise InputError(f"{problem}. But {steps} already used the old learning rates. {advice}")


def _factors(config: Config, steps: int) -> np.ndarray:
    """Return the learning-rate factor of each of the first `steps` steps, fp32 [steps]."""
    return jax.device_get(jax.jit(jax.vmap(learning_rate_factor(config)))(np.arange(steps, dtype=np.int32)))


def _steps_done(config: Config, step: int) -> list[tuple[int, ...]]:
    """Return (phase, first step, end, context, sequences) of each stage in the first `step` steps."""
    past = (stage for stage in stages(config) if stage.first_step < step)
    return [(each.phase, each.first_step, min(each.end, step), each.context, each.sequences) for each in past]


def _fixed_settings(phase: PhaseConfig) -> dict[str, Any]:
    """Return the settings of a phase that may not change once it has started; others are checked by its steps."""
    free = ("parallel", "remat", "tokens", "schedule")
    settings = {key: value for key, value in to_dict(phase).items() if key not in free}
    if settings["batch"] is not None:
        settings["batch"] = {key: value for key, value in settings["batch"].items() if key != "micro_batch"}
    return settings
