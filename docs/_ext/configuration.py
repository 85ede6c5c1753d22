"""The configuration reference, from the dataclasses of `zaya_jax.config` and the comments on their fields."""

import ast
import dataclasses
import functools
import inspect
import io
import re
import shlex
import sys
import tokenize
import types
import typing
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from zaya_jax.config import Config, RolesConfig, Table, flatten_keys, load_config, to_dict
from zaya_jax.config.bounds import LARGEST, Range
from zaya_jax.config.checks import shown
from zaya_jax.errors import InputError

CONFIGS = Path(__file__).parent.parent.parent / "configs"
TINY = CONFIGS / "tiny.yaml"
_KINDS = {int: "whole number", float: "number", str: "text", bool: "true or false"}
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
    "train.batch.tokens": ["train.batch.tokens=16_384"],
    "train.batch.start": ["train.batch.ramp_tokens=40_960", "train.batch.start=1024"],
    "train.batch.ramp_tokens": ["train.batch.start=1024", "train.batch.ramp_tokens=40_960"],
    "train.batch.stepped": ["train.batch.stepped=[{until: 40_960, tokens: 2048}]"],
    "train.batch.stepped.INDEX.until": ["train.batch.stepped=[{until: 40_960, tokens: 2048}]"],
    "train.batch.stepped.INDEX.tokens": ["train.batch.stepped=[{until: 40_960, tokens: 2048}]"],
    "optimizer.roles.ROLE.weight_decay": ["optimizer.roles.embedding.weight_decay=0"],
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


class Key(NamedTuple):
    """A key that holds a value, not only a section."""

    name: str  # dotted; NAME stands for a name that the user chooses, ROLE for one of the roles
    kind: str
    default: str
    meaning: str
    example: str  # overrides of configs/tiny.yaml that set the key


class Section(NamedTuple):
    """A dataclass of the configuration, where it is documented."""

    name: str  # dotted; empty for the whole configuration
    meaning: str
    keys: list[Key]
    places: list[str]  # where else the same keys are


def sections() -> list[Section]:
    """Return every section once: at its shortest key."""
    places: dict[type, list[str]] = {}
    for name, cls in _occurrences(Config, ""):
        places.setdefault(cls, []).append(name)
    documented = []
    for cls, names in places.items():
        if cls is RolesConfig:
            continue
        home, *others = sorted(names, key=lambda name: name.count("."))
        documented.append(Section(home, inspect.getdoc(cls) or "", list(_keys(cls, home)), others))
    return documented


def reference() -> str:
    """Return the reference in Markdown."""
    return "\n".join(_markdown(section) for section in sections())


def _markdown(section: Section) -> str:
    lines = [f"## `{section.name}`", "", section.meaning, ""] if section.name else ["## Keys of the run", ""]
    if section.places:
        lines += [f"The same keys are in {', '.join(f'`{place}`' for place in section.places)}.", ""]
    for key in section.keys:
        lines += [f"```{{confval}} {key.name}", f":type: {key.kind}", f":default: {key.default}", "",
                  f"{key.meaning[0].upper()}{key.meaning[1:].rstrip('.')}.", "", f"Example: `{key.example}`",
                  "```", ""]  # fmt: skip
    return "\n".join(lines)


def _occurrences(cls: type, name: str) -> Iterator[tuple[str, type]]:
    """Yield the key and class of a section and of all sections inside it."""
    yield name, cls
    for field, hint in _fields(cls):
        inner, suffix = _inner(hint)
        if inner is not None:
            own = "ROLE" if cls is RolesConfig else field.name
            yield from _occurrences(inner, f"{name}.{own}{suffix}".lstrip("."))
            if cls is RolesConfig:
                return


def _fields(cls: type) -> Iterator[tuple[dataclasses.Field, Any]]:
    hints = typing.get_type_hints(cls, include_extras=True)
    return ((field, hints[field.name]) for field in dataclasses.fields(cls))


def _parts(hint: Any) -> tuple[Any, bool, Range | None]:
    """Return a type without null and bounds, whether it allows null, and its bounds."""
    optional = typing.get_origin(hint) in (types.UnionType, typing.Union)
    hint = typing.get_args(hint)[0] if optional else hint
    bounds = getattr(hint, "__metadata__", (None,))[0]
    return (hint.__origin__ if bounds else hint), optional, bounds


def _inner(hint: Any) -> tuple[type | None, str]:
    """Return the dataclass of a section, or of each item of a list or table, and what the items' keys add."""
    hint = _parts(hint)[0]
    if typing.get_origin(hint) in (tuple, Table):
        item = typing.get_args(hint)[0]
        suffix = ".NAME" if typing.get_origin(hint) is Table or hasattr(item, "name") else ".INDEX"
        return (item, suffix) if dataclasses.is_dataclass(item) else (None, "")
    return (hint, "") if dataclasses.is_dataclass(hint) else (None, "")


def _keys(cls: type, section: str) -> Iterator[Key]:
    """Yield the keys of a section; ValueError if a field has no comment."""
    comments = _comments(cls)
    for field, hint in _fields(cls):
        plain, optional, bounds = _parts(hint)
        if dataclasses.is_dataclass(plain) and not optional:
            continue
        if not comments[field.name]:
            raise ValueError(f"{cls.__name__}.{field.name} needs a comment that says what the key means.")
        name = f"{section}.{field.name}".lstrip(".")
        largest = None if typing.get_origin(plain) is tuple else LARGEST.get(f"{cls.__name__}.{field.name}")
        allowed = [*([bounds.words] if bounds else []), *([f"at most {largest:,.0f}"] if largest else [])]
        kind = ", ".join([" ".join([_kind(plain), *allowed[:1]]), *allowed[1:], *(["or null"] if optional else [])])
        choices = typing.get_args(plain) if typing.get_origin(plain) is typing.Literal else ()
        meaning = re.sub(rf"\b({'|'.join([*choices, 'null'])}):", r"`\1`:", comments[field.name])
        yield Key(name, kind, _default(field), meaning, _example(name, field, plain))


def _kind(hint: Any) -> str:
    """Name a type in the words of YAML."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return f"one of {', '.join(args)}"
    if origin is Table:
        return f"section of names and {_kind(args[0])}s"
    if origin is tuple:
        item = _kind(args[0]).removeprefix("one of ").replace("list of", "pairs of")
        return f"list of {item if ' of ' in item or ',' in item else f'{item}s'}"
    return "section" if dataclasses.is_dataclass(hint) else _KINDS[hint]


def _default(field: dataclasses.Field) -> str:
    if field.default is not dataclasses.MISSING:
        return _yaml(field.default)
    return "required" if field.default_factory is dataclasses.MISSING else "{}"


def _yaml(value: Any) -> str:
    """Format a value as an override would give it."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    if type(value) is int and value >= 10_000:
        return f"{value:_}"
    if isinstance(value, float) and not 1e-3 <= value < 1e5 and value:
        return f"{value:.1e}"
    return value if isinstance(value, str) else shown(value)


def _example(name: str, field: dataclasses.Field, hint: Any) -> str:
    """Return overrides of configs/tiny.yaml that set the key to another value than its default, and are accepted."""
    key = name.replace("phases.NAME", "phases.train").replace("ROLE", "embedding")
    written = [_EXAMPLES[name]] if name in _EXAMPLES else ()
    for overrides in written or ([f"{key}={value}"] for value in _values(name, field, hint)):
        try:
            load_config(TINY, overrides)
        except InputError:
            continue
        return shlex.join(overrides)
    return ""


def _values(name: str, field: dataclasses.Field, hint: Any) -> Iterator[str]:
    default = None if field.default is dataclasses.MISSING else field.default
    if typing.get_origin(hint) is typing.Literal:
        yield from (choice for choice in typing.get_args(hint) if choice != default)
    if hint is bool:
        yield _yaml(not default)
    for tree in _shipped():
        value = tree.get(name.replace("ROLE", "embedding"))
        if value is not None and value != default:
            yield _yaml(value)
    if isinstance(default, float):
        yield from (_yaml(value) for value in (0.9, 0.99) if value != default and 0.5 < default < 1)
    if hint in (int, float):
        yield from (_yaml(hint((default or 1) * factor)) for factor in (2, 4, 0.5))


@functools.cache
def _shipped() -> list[dict[str, Any]]:
    """Return the keys and values of each shipped configuration; those of its first phase as `phases.NAME`."""
    trees = []
    for path in sorted(CONFIGS.glob("*.yaml")):
        tree = to_dict(load_config(path))
        tree["phases"] = {"NAME": tree["phases"][0]}
        trees.append(dict(flatten_keys(tree)))
    return trees


@functools.cache
def _comments(cls: type) -> dict[str, str]:
    """Return the comment of each field: on its line, after its last line, or on the lines above it."""
    source = Path(sys.modules[cls.__module__].__file__ or "").read_text(encoding="utf-8")
    lines = source.splitlines()
    comments_by_line = {
        token.start[0]: token.string.removeprefix("#").strip()
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT and "fmt: skip" not in token.string
    }
    (definition,) = (node for node in ast.walk(ast.parse(source))
                     if isinstance(node, ast.ClassDef) and node.name == cls.__name__)  # fmt: skip
    comments = {}
    for node in definition.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            above = takewhile(lambda line: lines[line - 1].strip().startswith("#"), range(node.lineno - 1, 0, -1))
            numbers = [*reversed(list(above)), *range(node.lineno, (node.end_lineno or node.lineno) + 1)]
            comments[node.target.id] = " ".join(comments_by_line[line] for line in numbers if line in comments_by_line)
    return comments
