"""YAML to `Config`: `extends`, `a.b=c` overrides, and errors that name the key and the nearest spelling."""

import contextlib
import dataclasses
import functools
import math
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from zaya_jax.config.checks import item_keys, require, require_path, shown
from zaya_jax.config.model import ModelConfig
from zaya_jax.config.other_names import TRANSLATED, example
from zaya_jax.config.phases import PhaseConfig
from zaya_jax.config.schema import Config
from zaya_jax.config.shipped import find
from zaya_jax.config.stages import stages
from zaya_jax.config.table import Table
from zaya_jax.config.yaml_text import MAX_BYTES, kind, parse_yaml
from zaya_jax.errors import InputError, did_you_mean

_MAX_PARTS = 20  # limit on names in a dotted key (the schema has 5 levels) and on files in a chain of `extends`
_type_hints = functools.cache(typing.get_type_hints)
T = TypeVar("T")
# (section, key of an earlier version) → key; rejected in configurations, translated in saved runs and checkpoints
RENAMED = {
    ("batch", "micro"): "micro_batch",
    ("checkpoint", "loss_window"): "max_unsaved_seconds",
    ("evaluation", "batch"): "batch_size",
    ("muon", "iterates"): "newton_schulz_dtype",
    ("parallel", "reduce"): "gradient_reduction",
}
_UNITS = {"k": "_000", "K": "_000", "M": "_000_000", "G": "_000_000_000", "B": "_000_000_000"}
_EXPONENT = re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]{1,3}")  # 1e6, which YAML 1.1 reads as text


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read and check a YAML file.

    Its optional key `extends` is the path, relative to it, of a file whose values it overrides. If a path that starts
    with `configs/` does not exist, the shipped file of that name is read. Overrides, `section.key=value`, come last: a
    value is YAML; of a key that is text, such as a path, it is taken as it stands, unless it is in quotes, or null.
    Address list items by their `name` or index, as in `phases.midtrain.tokens=1_000_000`; the same works in a file.

    `InputError` if a file is missing or not YAML, a key is unknown or repeated, or a value has the wrong type or is
    wrong.
    """
    tree = _read(find(path), ())
    for override in overrides:
        key, equals, text = override.partition("=")
        parts = key.split(".")
        if not equals or not key or len(parts) > _MAX_PARTS:
            raise InputError(f"The override {shown(override)} must have the form section.key=value, without spaces.")
        value: Any = text
        if not _is_text(parts) or text[:1] in ("'", '"') or text in ("", "null", "~"):
            value = parse_yaml(text, f"The value of the override {shown(override)}")
        for part in reversed(parts):
            value = {part: value}
        tree = _merge(tree, value)
    config = from_dict(tree)
    config.data.check_read()  # not of a run that is read back: earlier versions let it have both
    return config


def _is_text(parts: Sequence[str]) -> bool:
    hint: Any = Config
    for part in parts:
        section = next((kind for kind in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(kind)), None)
        is_item = typing.get_origin(hint) in (tuple, Table)  # `part` is its index or name
        hint = section if is_item or section is None else _type_hints(section).get(part)
    return str in (hint, *typing.get_args(hint)) and typing.get_origin(hint) is not tuple


def from_dict(tree: Mapping[str, Any]) -> Config:
    """Build and check a configuration from nested dicts, such as `to_dict` returns; raises like `load_config`."""
    config = _build(Config, dict(tree), "")
    config.check()
    stages(config)  # raises if the run has too many steps
    return config


def load_as(cls: type[T], path: str | Path) -> T:
    """Read a YAML file as another frozen dataclass, without checking its values; raises like `load_config`."""
    return _build(cls, _read(find(path), ()), "")


def model_from_dict(tree: Mapping[str, Any]) -> ModelConfig:
    """Build and check the section `model` from a dict; raises like `load_config`."""
    config: ModelConfig = _build(ModelConfig, tree, "model")
    config.check()
    return config


def to_dict(config: Any) -> dict[str, Any]:
    """Convert a configuration to plain dicts and lists, in the order of the fields."""
    return {field.name: _plain(getattr(config, field.name)) for field in dataclasses.fields(config)}


def flatten_keys(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested dicts with dotted keys such as 'train.batch.tokens', each prefixed by `prefix`."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flatten_keys(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_dict(value)
    if isinstance(value, Table):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _read(path: Path, readers: tuple[Path, ...]) -> dict[str, Any]:
    """Read a file and those that it extends, in which `readers` are the files that extend it."""
    subject = f"The configuration {path}"
    require_path("The configuration", str(path))
    if path.resolve() in readers:
        raise InputError(f"{subject} extends itself.")
    if len(readers) > _MAX_PARTS:
        raise InputError(f"{subject} is reached through more than {_MAX_PARTS} extends, the limit; merge some files.")
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        text = content.decode() if len(content) <= MAX_BYTES else ""
    except OSError as error:
        raise InputError(f"{subject} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{subject} is not UTF-8 text.") from error
    if len(content) > MAX_BYTES:
        raise InputError(f"{subject} is larger than the limit of {MAX_BYTES:,} bytes.")
    tree = parse_yaml(text, subject)
    tree = {} if tree is None and readers else tree
    if tree is None:
        raise InputError(f"{subject} is empty.")
    if not isinstance(tree, dict):
        raise InputError(f"{subject} is {kind(tree)}, but must be a section with keys.")
    base = tree.pop("extends", None)
    if base is None:
        return tree
    require(isinstance(base, str), f"extends in {path}", base, "the path of a configuration")
    return _merge(_read(find(base, path.parent), (*readers, path.resolve())), tree)


def _merge(old: Any, value: Any, section: str = "") -> Any:
    """Override `old` by `value`, a section key by key."""
    if isinstance(old, dict) and isinstance(value, dict):
        return old | {key: _merge(old.get(key), item, _join(section, key)) for key, item in value.items()}
    return _merge_items(old, value, section) if isinstance(old, list) and isinstance(value, dict) else value


def _merge_items(base: list[Any], over: Mapping[str, Any], section: str) -> list[Any]:
    """Override items of the list `base`, each addressed by its `name` or index."""
    merged = list(base)
    names = _names(base, PhaseConfig if section == "phases" else None)
    for key, value in over.items():
        if key in names:
            index = names.index(key)
        elif key.isdecimal() and len(key) < 10 and int(key) < len(base):
            index = int(key)
        else:
            known = [str(place) + (f" ({name})" if isinstance(name, str) else "") for place, name in enumerate(names)]
            hint = did_you_mean(key, [name for name in names if isinstance(name, str)], f"{section}.")
            items = f"the items of {section} are {', '.join(known[:9]) or 'none'}"
            raise InputError(f"There is no {shown(_join(section, key))}; {items}.{hint}")
        merged[index] = _merge(merged[index], value, _join(section, key))
    return merged


def _names(items: list[Any], cls: Any) -> list[Any]:
    """Return the name of each item of a list, defaulting to the class attribute of `cls`; None if it has none."""
    default = getattr(cls, "name", None)
    return [item.get("name", default) if isinstance(item, dict) else None for item in items]


def _build(cls: type, tree: Any, where: str) -> Any:
    require(isinstance(tree, dict), where or "The configuration", tree, "a section with keys")
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for key in tree:
        if current := RENAMED.get((where.rpartition(".")[2], key)):
            raise InputError(f"The key {_join(where, key)} was renamed; use {_join(where, current)} instead.")
        if key not in fields:
            unknown = _join(where, key if len(key) <= 50 and key.isprintable() else shown(key))
            is_ours = cls.__module__.startswith("zaya_jax.config.")  # not the tasks of an evaluation
            if is_ours and key in TRANSLATED:
                converted = "" if where else example(key, tree[key], tree)
                raise InputError(f"The key {unknown} is unknown. {TRANSLATED[key]}{converted}")
            full = _suggest_full_keys(key, tree) if is_ours and not where else ""
            hint = did_you_mean(key, fields, _join(where, "")) or full
            raise InputError(f"The key {unknown} is unknown.{hint} Allowed keys: {', '.join(fields)}.")
    hints = _type_hints(cls)
    values = {name: _convert(hints[name], tree[name], _join(where, name)) for name in fields if name in tree}
    absent = (field for name, field in fields.items() if name not in tree)
    required = (each for each in absent if each.default is each.default_factory is dataclasses.MISSING)
    if missing := [_join(where, each.name) for each in required]:
        raise InputError(f"{', '.join(missing)} must be set: there is no default.")
    return cls(**values)


def _suggest_full_keys(name: str, tree: Mapping[str, Any]) -> str:
    """Return ' Did you mean X or Y?' for up to three keys that end in `name`, where a user left out the section."""
    phases = tree.get("phases")
    named = [phase for phase in phases if isinstance(phase, dict)] if isinstance(phases, list) else []
    known = override_keys({"phases": [{"name": PhaseConfig.name} | phase for phase in named]})
    keys = [key for key, _ in known if key.rpartition(".")[2] == name]
    return f" Did you mean {' or '.join(keys[:3])}?" if keys else ""


def _convert(hint: Any, value: Any, key: str) -> Any:
    """Convert `value` to the type `hint`, or raise an error that names the key."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return _build(typing.cast(type, hint), value, key)
    if origin in (types.UnionType, typing.Union):  # only `X | None` is used
        return None if value is None else _convert(args[0], value, key)
    if origin is typing.Literal:
        if value in args:
            return value
        nearest = did_you_mean(value, args) if isinstance(value, str) else ""
        raise InputError(f"{key} is {shown(value)}, but must be one of {', '.join(args)}.{nearest}")
    if origin is tuple:
        such = f", such as [{value}]" if kind(value) == "text" and not dataclasses.is_dataclass(args[0]) else ""
        require(isinstance(value, list), key, value, f"a list{such}")
        keys = item_keys(key, _names(value, args[0]))
        return tuple(_convert(args[0], item, item_key) for item, item_key in zip(value, keys, strict=True))
    if origin is Table:
        require(isinstance(value, dict), key, value, "a section of names and values")
        # A file that extends another can remove an entry by setting it to null.
        entries = {name: item for name, item in value.items() if item is not None}
        return Table({name: _convert(args[0], item, _join(key, name)) for name, item in entries.items()})
    if hint in (int, float):
        return _number(hint, value, key)
    if type(value) is not hint:
        raise _wrong_kind(value, key, {str: "text", bool: "true or false"}[hint])
    return value


def _number(hint: type, value: Any, key: str) -> int | float:
    """Convert `value` to an int or a float; YAML reads 1e-3 and 1e6 as text, but they are valid numbers here."""
    if type(value) is hint is int:  # `True` is an int to isinstance
        return value
    is_text = isinstance(value, str) and (hint is float or _EXPONENT.fullmatch(value) is not None)
    with contextlib.suppress(ValueError, OverflowError):
        number = float(value) if type(value) in (int, float) or is_text else math.nan
        if math.isfinite(number) and (hint is float or number.is_integer()):
            return hint(number)
    such = ""
    if hint is int and isinstance(value, str) and re.fullmatch("[1-9][0-9]{,20}[kKMGB]", value):
        such = f", such as {value[:-1]}{_UNITS[value[-1]]}"
    raise _wrong_kind(value, key, f"a whole number{such}" if hint is int else "a finite number")


def _wrong_kind(value: Any, key: str, allowed: str) -> InputError:
    type_name = "" if value is None else f" ({kind(value)})"
    return InputError(f"{key} is {shown(value)}{type_name}, but must be {allowed}.")


def _join(section: str, key: str) -> str:
    return f"{section}.{key}" if section else key


def override_keys(tree: Mapping[str, Any], cls: Any = Config, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each leaf key of a section, such as `train.batch.tokens`, with the prefix `prefix`, and its type.

    The names of phases and sources are those of `tree`, a configuration as `to_dict` returns it.
    """
    for name, hint in _type_hints(cls).items():
        kinds, value, key = (hint, *typing.get_args(hint)), tree.get(name), f"{prefix}{name}"
        section = next((kind for kind in kinds if dataclasses.is_dataclass(kind)), None)
        if section is None:
            yield key, hint
        elif typing.get_origin(hint) in (tuple, Table):
            items = value.items() if isinstance(value, dict) else enumerate(value or ())
            for place, item in items:
                own = place if isinstance(value, dict) else item.get("name", place)
                yield from override_keys(item, section, f"{key}.{own}.")
        else:
            yield from override_keys(value or {}, section, f"{key}.")


def value_choices(hint: Any) -> list[str]:
    """Return the values of a key that has a small set of them, in YAML: those of a Literal, true and false, null."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return list(args)
    if origin in (types.UnionType, typing.Union):
        return [choice for kind in args for choice in value_choices(kind)]
    return {bool: ["true", "false"], type(None): ["null"]}.get(hint, [])


def with_current_keys(tree: Any, section: str = "") -> Any:
    """Translate the keys of a saved configuration to those of this version."""
    if isinstance(tree, list):
        return [with_current_keys(item) for item in tree]
    if isinstance(tree, dict):
        return {RENAMED.get((section, key), key): with_current_keys(value, key) for key, value in tree.items()}
    return tree


def current_key(dotted: str) -> str:
    """Translate a dotted key of a saved configuration to this version's key."""
    names = dotted.split(".")
    return ".".join(RENAMED.get((section, key), key) for section, key in zip(["", *names], names, strict=False))
