"""YAML to `Config`: `extends`, `a.b=c` overrides, and errors that name the key and the nearest spelling."""

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
from zaya_jax.config.keys import override_keys
from zaya_jax.config.model import ModelConfig
from zaya_jax.config.phases import PhaseConfig
from zaya_jax.config.renamed import RENAMED
from zaya_jax.config.schema import Config
from zaya_jax.config.shipped import find
from zaya_jax.config.stages import stages
from zaya_jax.config.table import Table
from zaya_jax.config.yaml_text import MAX_BYTES, dump_yaml, kind, parse_yaml
from zaya_jax.errors import InputError, did_you_mean

_MAX_PARTS = 20  # limit on names in a dotted key (the schema has 5 levels) and on files in a chain of `extends`
_type_hints = functools.cache(typing.get_type_hints)
T = TypeVar("T")
_EXPONENT = re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]{1,3}")  # 1e6, which YAML 1.1 reads as text


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a configuration.

    Args:
      path: a YAML file. Its optional key `extends` is the path, relative to it, of a file whose values it overrides.
        If a path that starts with `configs/` does not exist, the shipped file of that name is read.
      overrides: `section.key=value`, applied last. A value is YAML; of a key that is text, such as a path, it is taken
        as it stands, unless it is in quotes, or null. Address list items by their `name` or index, as in
        `phases.midtrain.tokens=1_000_000`; the same works in a file.

    Returns:
      The checked configuration.

    Raises:
      InputError: the file is missing or is not YAML; a key is unknown or repeated; a value has the wrong type or is
        invalid.
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
    """Return whether the value of a dotted key is text."""
    hint: Any = Config
    for part in parts:
        section = next((kind for kind in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(kind)), None)
        is_item = typing.get_origin(hint) in (tuple, Table)  # `part` is its index or name
        hint = section if is_item or section is None else _type_hints(section).get(part)
    return str in (hint, *typing.get_args(hint)) and typing.get_origin(hint) is not tuple


def from_dict(tree: Mapping[str, Any]) -> Config:
    """Build and check a configuration from nested dicts, such as `to_dict` returns.

    Raises:
      InputError: see `load_config`.
    """
    config = _build(Config, dict(tree), "")
    config.check()
    stages(config)  # raises if the run has too many steps
    return config


def load_as(cls: type[T], path: str | Path) -> T:
    """Read a YAML file as another frozen dataclass, without checking its values; raises like `load_config`."""
    return _build(cls, _read(find(path), ()), "")


def model_from_dict(tree: Mapping[str, Any]) -> ModelConfig:
    """Build and check the section `model` from a dict.

    Raises:
      InputError: see `load_config`.
    """
    config: ModelConfig = _build(ModelConfig, tree, "model")
    config.check()
    return config


def to_dict(config: Any) -> dict[str, Any]:
    """Convert a configuration to plain dicts and lists, in the order of the fields."""
    return {field.name: _plain(getattr(config, field.name)) for field in dataclasses.fields(config)}


def flatten_keys(tree: dict[str, Any], where: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested dicts with dotted keys such as 'train.batch.tokens', each prefixed by `where`."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flatten_keys(value, f"{where}{key}.")
        else:
            yield f"{where}{key}", value


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_dict(value)
    if isinstance(value, Table):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def to_yaml(config: Config) -> str:
    """Convert a configuration to YAML that `load_config` reads back unchanged."""
    return dump_yaml(to_dict(config))


def _read(path: Path, readers: tuple[Path, ...]) -> dict[str, Any]:
    """Read a file and those that it extends, in which `readers` are the files that extend it."""
    require_path("The configuration", str(path))
    if path.resolve() in readers:
        raise InputError(f"The configuration {path} extends itself.")
    if len(readers) > _MAX_PARTS:
        raise InputError(f"The configuration {path} is reached through more than {_MAX_PARTS} extends, the limit; "
                         "merge some of the files.")  # fmt: skip
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise InputError(f"The configuration {path} cannot be read: {error.strerror}.") from error
    if len(content) > MAX_BYTES:
        raise InputError(f"The configuration {path} is larger than the limit of {MAX_BYTES:,} bytes.")
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise InputError(f"The configuration {path} is not UTF-8 text.") from error
    tree = parse_yaml(text, f"The configuration {path}")
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        raise InputError(f"The configuration {path} is {kind(tree)}, but must be a section with keys.")
    base = tree.pop("extends", None)
    if base is None:
        return tree
    require(isinstance(base, str), f"extends in {path}", base, "the path of a configuration")
    return _merge(_read(find(base, path.parent), (*readers, path.resolve())), tree)


def _merge(base: Mapping[str, Any], over: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        old, here = merged.get(key), _join(where, key)
        if isinstance(old, dict) and isinstance(value, dict):
            merged[key] = _merge(old, value, here)
        elif isinstance(old, list) and isinstance(value, dict):
            merged[key] = _merge_items(old, value, here)
        else:
            merged[key] = value
    return merged


def _merge_items(base: list[Any], over: Mapping[str, Any], where: str) -> list[Any]:
    """Override items of the list `base`, each addressed by its `name` or index."""
    merged = list(base)
    names = _names(base, PhaseConfig if where == "phases" else None)
    for key, value in over.items():
        if key in names:
            index = names.index(key)
        elif key.isdecimal() and len(key) < 10 and int(key) < len(base):
            index = int(key)
        else:
            known = [str(place) + (f" ({name})" if isinstance(name, str) else "") for place, name in enumerate(names)]
            hint = did_you_mean(key, [name for name in names if isinstance(name, str)], f"{where}.")
            raise InputError(f"There is no {shown(_join(where, key))}; the items of {where} are "
                             f"{', '.join(known[:9]) or 'none'}.{hint}")  # fmt: skip
        item = merged[index]
        here = _join(where, key)
        merged[index] = _merge(item, value, here) if isinstance(item, dict) and isinstance(value, dict) else value
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
            hint = did_you_mean(key, fields, _join(where, "")) or ("" if where else _suggest_full_keys(key, tree))
            raise InputError(f"The key {unknown} is unknown.{hint} Allowed keys: {', '.join(fields)}.")
    hints = _type_hints(cls)
    values = {}
    for name, field in fields.items():
        if name in tree:
            values[name] = _convert(hints[name], tree[name], _join(where, name))
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise InputError(f"The key {_join(where, name)} is missing and has no default.")
    return cls(**values)


def _suggest_full_keys(name: str, tree: Mapping[str, Any]) -> str:
    """Return ' Did you mean X or Y?' for up to three keys that end in `name`, where a user left out the section."""
    phases = tree.get("phases")
    named = [phase for phase in phases if isinstance(phase, dict)] if isinstance(phases, list) else []
    default = {"name": PhaseConfig.name}
    keys = [key for key, _ in override_keys({"phases": [default | phase for phase in named]})
            if key.rpartition(".")[2] == name]  # fmt: skip
    return f" Did you mean {' or '.join(keys[:3])}?" if keys else ""


def _convert(hint: Any, value: Any, where: str) -> Any:
    """Convert `value` to the type `hint`, or raise an error that names the key."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return _build(typing.cast(type, hint), value, where)
    if origin in (types.UnionType, typing.Union):  # only `X | None` is used
        return None if value is None else _convert(args[0], value, where)
    if origin is typing.Literal:
        if not isinstance(value, str) or value not in args:
            hint = did_you_mean(value, args) if isinstance(value, str) else ""
            raise InputError(f"{where} is {shown(value)}, but must be one of {', '.join(args)}.{hint}")
        return value
    if origin is tuple:
        require(isinstance(value, list), where, value, "a list")
        keys = item_keys(where, _names(value, args[0]))
        return tuple(_convert(args[0], item, key) for item, key in zip(value, keys, strict=True))
    if origin is Table:
        require(isinstance(value, dict), where, value, "a section of names and values")
        # A file that extends another can remove an entry by setting it to null.
        return Table({name: _convert(args[0], item, _join(where, name)) for name, item in value.items()
                      if item is not None})  # fmt: skip
    if hint in (int, float):
        return _number(hint, value, where)
    if type(value) is not hint:
        raise _wrong_kind(value, where, {str: "text", bool: "true or false"}[hint])
    return value


def _number(hint: type, value: Any, where: str) -> int | float:
    """Convert `value` to an int or a float; YAML reads 1e-3 and 1e6 as text, but they are valid numbers here."""
    if type(value) is hint is int:  # `True` is an int to isinstance
        return value
    is_text = isinstance(value, str) and (hint is float or _EXPONENT.fullmatch(value) is not None)
    if type(value) in (int, float) or is_text:
        try:
            number = float(value)
        except (ValueError, OverflowError):
            number = math.nan
        if math.isfinite(number) and (hint is float or number.is_integer()):
            return hint(number)
    raise _wrong_kind(value, where, "a whole number" if hint is int else "a finite number")


def _wrong_kind(value: Any, where: str, allowed: str) -> InputError:
    type_name = "" if value is None else f" ({kind(value)})"
    return InputError(f"{where} is {shown(value)}{type_name}, but must be {allowed}.")


def _join(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key
