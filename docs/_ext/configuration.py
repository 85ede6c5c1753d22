"""The configuration reference, from the dataclasses of `zaya_jax.config` and the comments on their fields."""

import dataclasses
import shlex
import typing
from collections.abc import Iterator
from pathlib import Path

from zaya_jax.config import load_config
from zaya_jax.config.reference import Key, Section, format_value, sections, shipped_values
from zaya_jax.errors import InputError

TINY = Path(__file__).parent.parent.parent / "configs/tiny.yaml"
# Overrides of configs/tiny.yaml where neither a shipped configuration nor the type provides one; the last sets the key.
_EXAMPLES = {
    "run_dir": ["run_dir=runs/mine"],
    "measurements": ["measurements=benchmarks/machine_cpu"],
    "init_from": ["init_from=runs/earlier"],
    "resume_from": ["resume_from=runs/earlier"],
    "start_phase": ["start_phase=train"],
    "lora": ["init_from=runs/earlier", "lora={rank: 16, alpha: 32}"],
    "lora.rank": ["init_from=runs/earlier", "lora.alpha=32", "lora.rank=16"],
    "lora.alpha": ["init_from=runs/earlier", "lora.rank=16", "lora.alpha=32"],
    "profile": ["profile={start: 20}"],
    "profile.start": ["profile.start=20"],
    "profile.steps": ["profile.start=20", "profile.steps=5"],
    "model.layer_pattern": ["model.sliding_window=256", "model.layer_pattern=[full, sliding]"],
    "model.sliding_window": ["model.layer_pattern=[full, sliding]", "model.sliding_window=256"],
    "phases": ["phases=[{name: train, tokens: 61_440}]"],
    "phases.NAME.batch": ["phases.train.batch={tokens: 8192}"],
    "phases.NAME.context": ["phases.train.context=1024"],
    "phases.NAME.mixture": ["phases.train.mixture={corpus: 1}"],
    "phases.NAME.name": ["phases.train.name=pretrain"],
    "phases.NAME.parallel": ["phases.train.parallel={fsdp: 2}"],
    "phases.NAME.rope_base": ["phases.train.rope_base=1.0e+5"],
    "phases.NAME.schedule": ["phases.train.schedule={shape: linear, final: 0}"],
    "phases.NAME.schedule.shape": ["phases.train.schedule.decay_tokens=409_600", "phases.train.schedule.shape=wsd"],
    "phases.NAME.schedule.decay_tokens": ["phases.train.schedule={shape: wsd, decay_tokens: 409_600}"],
    "phases.NAME.template": ["phases.train.template=chat.jinja"],
    "phases.NAME.tokens": ["phases.train.tokens=61_440"],
    "train.sinks": ["train.sinks=[tensorboard]"],
    "train.batch.tokens": ["train.batch.tokens=16_384"],
    "train.batch.start": ["train.batch.ramp_tokens=40_960", "train.batch.start=1024"],
    "train.batch.ramp_tokens": ["train.batch.start=1024", "train.batch.ramp_tokens=40_960"],
    "train.batch.stepped": ["train.batch.stepped=[{until: 40_960, tokens: 2048}]"],
    "train.batch.stepped.INDEX.until": ["train.batch.stepped=[{until: 40_960, tokens: 2048}]"],
    "train.batch.stepped.INDEX.tokens": ["train.batch.stepped=[{until: 40_960, tokens: 2048}]"],
    "optimizer.roles.attention.weight_decay": ["optimizer.roles.attention.weight_decay=0"],
    "ops": ["ops.attention=reference"],
    "parallel.data": ["parallel.data=4"],
    "data.corpus": ["data.corpus=zaya_jax"],
    "data.suffixes": ["data.suffixes=[.py, .md]"],
    "data.cache_dir": ["data.cache_dir=/local/data"],
    "data.sources": ["data.sources={web: {path: data/web}}"],
    "data.sources.NAME.path": ["data.sources.web.path=data/web"],
    "data.sources.NAME.max_epochs": ["data.sources.web.path=data/web", "data.sources.web.max_epochs=4"],
    "data.skip_rows": ["data.skip_rows=[[84, 100]]"],
    "checkpoint.keep_every": ["checkpoint.keep_every=1000"],
    "checkpoint.local_dir": ["checkpoint.local_dir=/local/checkpoints"],
    "sample.prompt": ["sample.prompt=class"],
}


def reference() -> str:
    """Return the reference in Markdown."""
    return "\n".join(_markdown(section) for section in sections())


def _markdown(section: Section) -> str:
    lines = [f"## `{section.name}`", "", section.meaning, ""] if section.name else ["## Keys of the run", ""]
    if section.places:
        lines += [f"The same keys are in {', '.join(f'`{place}`' for place in section.places)}.", ""]
    for key in section.keys:
        lines += [f"```{{confval}} {key.name}", f":type: {key.kind}", f":default: {key.default}", "",
                  key.sentence, "", f"Example: `{example(key)}`",
                  "```", ""]  # fmt: skip
    return "\n".join(lines)


def example(key: Key) -> str:
    """Return overrides of configs/tiny.yaml that set the key to another value than its default, and are accepted."""
    name = key.name.replace("phases.NAME", "phases.train")
    written = [_EXAMPLES[key.name]] if key.name in _EXAMPLES else ()
    for overrides in written or ([f"{name}={value}"] for value in _values(key)):
        try:
            load_config(TINY, overrides)
        except InputError:
            continue
        return shlex.join(overrides)
    return ""


def _values(key: Key) -> Iterator[str]:
    default = None if key.field.default is dataclasses.MISSING else key.field.default
    if typing.get_origin(key.hint) is typing.Literal:
        yield from (choice for choice in typing.get_args(key.hint) if choice != default)
    if key.hint is bool:
        yield format_value(not default)
    yield from shipped_values(key).values()
    if isinstance(default, float):
        yield from (format_value(value) for value in (0.9, 0.99) if value != default and 0.5 < default < 1)
    if key.hint in (int, float):
        yield from (format_value(key.hint((default or 1) * factor)) for factor in (2, 4, 0.5))
