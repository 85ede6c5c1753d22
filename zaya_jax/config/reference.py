"""Meaning, type, bounds and default of every key, from the dataclasses and the comments on their fields."""

import dataclasses
import functools
import inspect
import itertools
import re
import types
import typing
from collections.abc import Iterator
from typing import Any, NamedTuple

from zaya_jax.config.bounds import LARGEST, Range
from zaya_jax.config.checks import shown
from zaya_jax.config.loader import flatten_keys, load_config, to_dict
from zaya_jax.config.schema import Config
from zaya_jax.config.shipped import shipped_names
from zaya_jax.config.table import Table
from zaya_jax.config.yaml_text import dump_yaml

_KINDS = {int: "whole number", float: "number", str: "text", bool: "true or false"}


class Key(NamedTuple):
    """A key that holds a value, not only a section."""

    name: str  # dotted; NAME stands for a name that the user chooses, INDEX for a position
    kind: str  # its type and bounds
    default: str  # in YAML; `required` without one
    meaning: str
    hint: Any  # its type, without null and bounds
    field: dataclasses.Field

    @property
    def sentence(self) -> str:
        """The meaning as a sentence."""
        return f"{self.meaning[0].upper()}{self.meaning[1:].rstrip('.')}."


class Section(NamedTuple):
    """A dataclass of the configuration, where it is documented."""

    name: str  # dotted; empty for the whole configuration
    meaning: str
    keys: list[Key]
    places: list[str]  # where else the same keys are


@functools.cache
def sections() -> list[Section]:
    """Return every section once: at its shortest key."""
    places: dict[type, list[str]] = {}
    for name, cls in _occurrences(Config, ""):
        places.setdefault(cls, []).append(name)
    documented = []
    for cls, names in places.items():
        home, *others = sorted(names, key=lambda name: name.count("."))
        documented.append(Section(home, inspect.getdoc(cls) or "", list(_keys(cls, home)), others))
    return documented


def generic(name: str) -> str:
    """Return a dotted key with NAME and INDEX for the user's own names of phases and sources, and for positions."""
    return re.sub(r"(\.stepped)\.[^.]+", r"\1.INDEX", re.sub(r"^(phases|data\.sources)\.[^.]+", r"\1.NAME", name))


@functools.cache
def keys_by_place() -> dict[str, Key]:
    """Return each key at each of its places, by its generic name there."""
    found = {}
    for section in sections():
        for key, place in itertools.product(section.keys, (section.name, *section.places)):
            name = f"{place}.{key.field.name}".lstrip(".")
            found[name] = key._replace(name=name)
    return found


def shipped_values(key: Key) -> dict[str, str]:
    """Return the values, in YAML, that shipped configurations give a key other than its default, by file."""
    values = {}
    for file, tree in _shipped().items():
        texts = dict.fromkeys(format_value(value) for name, value in tree.items() if generic(name) == key.name)
        if texts and list(texts) != [key.default]:
            values[file] = ", ".join(texts)
    return values


def to_yaml(config: Config, *, comments: bool = False) -> str:
    """Convert a configuration to YAML that `load_config` reads back unchanged, with `comments` what each key means."""
    tree = to_dict(config)
    return "\n".join([*_commented(tree, ""), ""]) if comments else dump_yaml(tree)


def _commented(tree: dict[str, Any], section: str) -> Iterator[str]:
    for name, value in tree.items():
        dotted = f"{section}.{name}".lstrip(".")
        if key := keys_by_place().get(generic(dotted)):
            default = key.default if key.default == "required" else f"default: {key.default}"
            yield f"# {key.sentence.removesuffix('.')} ({key.kind}; {default})"
        if value and isinstance(value, dict):
            yield dump_yaml({name: None}).removesuffix(" null\n")
            yield from (f"  {line}" for line in _commented(value, dotted))
        elif value and isinstance(value, list) and isinstance(value[0], dict):
            yield f"{name}:"
            for item in value:
                yield "-"
                yield from (f"  {line}" for line in _commented(item, f"{dotted}.0"))
        else:
            yield from dump_yaml({name: value}).splitlines()


@functools.cache
def _shipped() -> dict[str, dict[str, Any]]:
    """Return the keys and values of each shipped configuration, by its name."""
    trees = {name: to_dict(load_config(name)) for name in shipped_names()}
    for tree in trees.values():
        tree["phases"] = {phase["name"]: phase for phase in tree["phases"]}
    return {name: dict(flatten_keys(tree)) for name, tree in trees.items()}


def _occurrences(cls: type, name: str) -> Iterator[tuple[str, type]]:
    """Yield the key and class of a section and of all sections inside it."""
    yield name, cls
    for field, hint in _fields(cls):
        inner, suffix = _inner(hint)
        if inner is not None:
            yield from _occurrences(inner, f"{name}.{field.name}{suffix}".lstrip("."))


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
        return (item, suffix) if isinstance(item, type) and dataclasses.is_dataclass(item) else (None, "")
    return (hint, "") if isinstance(hint, type) and dataclasses.is_dataclass(hint) else (None, "")


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
        yield Key(name, kind, _default(field), meaning, plain, field)


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
        return format_value(field.default)
    return "required" if field.default_factory is dataclasses.MISSING else "{}"


def format_value(value: Any) -> str:
    """Format a value as an override would give it."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    if type(value) is int and value >= 10_000:
        return f"{value:_}"
    if isinstance(value, float) and not 1e-3 <= value < 1e5 and value:
        return f"{value:.1e}"
    return value if isinstance(value, str) else shown(value)


def _comments(cls: type) -> dict[str, str]:
    """Return the comment of each field: on its line, after its last line, or on the lines above it."""
    comments: dict[str, list[str]] = {}
    above: list[str] = []
    last = above
    fields = re.split(r"\n    (?:def|@)", inspect.getsource(cls))[0]
    for line in fields.splitlines():
        code, _, comment = line.partition("# ")
        if field := re.match(r" {4}(\w+): ", code):
            last = comments[field[1]] = above
            above = []
        if comment:
            (last if code.strip() else above).append(comment)
    return {name: " ".join(texts) for name, texts in comments.items()}
