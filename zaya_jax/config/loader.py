"""YAML to `Config`: `extends`, `a.b=c` overrides, and errors that name the key and the nearest spelling."""

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from zaya_jax.config.model import ModelConfig
from zaya_jax.config.schema import Config
from zaya_jax.config.stages import stages
from zaya_jax.config.table import Table
from zaya_jax.errors import InputError


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a configuration.

    Args:
      path: a YAML file. Its key `extends` names another, relative to it, whose values it overrides.
      overrides: `section.key=value`, the value in YAML, applied last. Items of a list are overridden by their
        `name` or their index (`phases.midtrain.tokens=1_000_000`), in a file likewise.

    Returns:
      The checked configuration.

    Raises:
      InputError: the file is missing or is not YAML; a key is unknown or given twice; a value has the
        wrong type or cannot be.
    """
    tree = _read(Path(path), ())
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            raise InputError(f"The override {override!r} is not of the form section.key=value.")
        value = _parse(text, f"The value of the override {override!r}")
        for part in reversed(key.split(".")):
            value = {part: value}
        tree = _merge(tree, value)
    return from_dict(tree)


def from_dict(tree: Mapping[str, Any]) -> Config:
    """The checked configuration of a tree that `to_dict` made, or YAML.

    Raises:
      InputError: as `load_config`.
    """
    config = _build(Config, dict(tree), "")
    config.check()
    stages(config)  # raises where the steps of the run cannot be counted
    return config


def model_from_dict(tree: Mapping[str, Any]) -> ModelConfig:
    """The architecture that `to_dict` described.

    Raises:
      InputError: as `load_config`, for the section `model`.
    """
    config: ModelConfig = _build(ModelConfig, tree, "model")
    config.check()
    return config


def to_dict(config: Any) -> dict[str, Any]:
    """The resolved tree as plain dicts and lists, in the order of the fields."""
    return {field.name: _plain(getattr(config, field.name)) for field in dataclasses.fields(config)}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_dict(value)
    if isinstance(value, Table):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def to_yaml(config: Config) -> str:
    """The resolved tree as YAML that `load_config` reads back to an equal configuration."""
    return yaml.dump(to_dict(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


class _Dumper(yaml.SafeDumper):
    """Writes floats so that YAML reads them back as floats (1.0e-05, where Python writes 1e-05)."""


def _represent_float(dumper: yaml.SafeDumper, value: float) -> yaml.Node:
    text = repr(value)
    if "e" in text and "." not in text:
        text = text.replace("e", ".0e")
    return dumper.represent_scalar("tag:yaml.org,2002:float", text)


_Dumper.add_representer(float, _represent_float)


class _Loader(yaml.SafeLoader):
    """A safe loader that refuses a key given twice, which YAML itself would silently take the last of."""


def _construct_mapping(loader: _Loader, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
    seen = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=deep)
        if not isinstance(key, str):
            raise InputError(f"The key {key!r} on line {key_node.start_mark.line + 1} is not a name.")
        if key in seen:
            raise InputError(f"The key {key!r} is given twice, again on line {key_node.start_mark.line + 1}.")
        seen.add(key)
    return yaml.SafeLoader.construct_mapping(loader, node, deep=True)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _construct_mapping)


def _parse(text: str, what: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506 (a SafeLoader)
    except InputError as error:
        raise InputError(f"{what} cannot be used. {error}") from error
    except (yaml.YAMLError, ValueError) as error:  # a date or number that is none is a ValueError
        raise InputError(f"{what} is not YAML: {_one_line(error)}.") from error


def _read(path: Path, readers: tuple[Path, ...]) -> dict[str, Any]:
    if "\0" in str(path):
        raise InputError(f"The configuration {str(path)!r} can be no path: it holds a NUL character.")
    if path.resolve() in readers:
        raise InputError(f"The configuration {path} extends itself.")
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"The configuration {path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise InputError(f"The configuration {path} is not UTF-8 text.") from error
    tree = _parse(text, f"The configuration {path}")
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        raise InputError(f"The configuration {path} holds a {_kind(tree)}, but must hold keys and values.")
    base = tree.pop("extends", None)
    if base is None:
        return tree
    if not isinstance(base, str):
        raise InputError(f"extends in {path} is {base!r}, but must be the path of a configuration.")
    return _merge(_read(path.parent / base, (*readers, path.resolve())), tree)


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
    """The list `base` with some of its items overridden, each found by its `name` or its index."""
    merged = list(base)
    names = [item.get("name") if isinstance(item, dict) else None for item in base]
    for key, value in over.items():
        if key in names:
            index = names.index(key)
        elif key.isdecimal() and int(key) < len(base):
            index = int(key)
        else:
            known = [name if isinstance(name, str) else str(place) for place, name in enumerate(names)]
            raise InputError(f"{where} has no item {key!r}; it has {', '.join(known) or 'none'}.")
        item = merged[index]
        here = _join(where, key)
        merged[index] = _merge(item, value, here) if isinstance(item, dict) and isinstance(value, dict) else value
    return merged


def _build(cls: type, tree: Any, where: str) -> Any:
    if not isinstance(tree, dict):
        raise InputError(f"{where or 'The configuration'} is {tree!r}, but must be a section with keys.")
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for key in tree:
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1)
            hint = f"did you mean {_join(where, near[0])}? Allowed" if near else "allowed"
            raise InputError(f"The key {_join(where, key)} is unknown; {hint} are: {', '.join(fields)}.")
    hints = typing.get_type_hints(cls)
    values = {}
    for name, field in fields.items():
        if name in tree:
            values[name] = _convert(hints[name], tree[name], _join(where, name))
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise InputError(f"The key {_join(where, name)} is missing and has no default.")
    return cls(**values)


def _convert(hint: Any, value: Any, where: str) -> Any:
    """`value` as the type `hint`, or an error that names the key."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return _build(typing.cast(type, hint), value, where)
    if origin in (types.UnionType, typing.Union):  # only `X | None` is used
        return None if value is None else _convert(args[0], value, where)
    if origin is typing.Literal:
        if value not in args:
            near = difflib.get_close_matches(str(value), args, n=1)
            hint_text = f" (did you mean {near[0]!r}?)" if near else ""
            raise InputError(f"{where} is {value!r}, but must be one of {', '.join(map(repr, args))}{hint_text}.")
        return value
    if origin is tuple:
        if not isinstance(value, list):
            raise InputError(f"{where} is {value!r}, but must be a list.")
        return tuple(_convert(args[0], item, f"{where}[{index}]") for index, item in enumerate(value))
    if origin is Table:
        if not isinstance(value, dict):
            raise InputError(f"{where} is {value!r}, but must be a section of names and values.")
        # What a file lists, another that extends it can take out again with null.
        return Table({name: _convert(args[0], item, _join(where, name)) for name, item in value.items()
                      if item is not None})  # fmt: skip
    if hint is float:
        return _float(value, where)
    if type(value) is not hint:  # `True` is an int to isinstance, so types are compared
        raise InputError(f"{where} is {value!r} ({_kind(value)}), but must be {_NAMES[hint]}.")
    return value


def _float(value: Any, where: str) -> float:
    # YAML 1.1 reads 1e-3 as text (it wants 1.0e-3), so text that is a number is taken as the number.
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            number = float(value)
        except (ValueError, OverflowError):
            pass
        else:
            if math.isfinite(number):
                return number
    raise InputError(f"{where} is {value!r} ({_kind(value)}), but must be a finite number.")


_NAMES = {int: "a whole number", str: "text", bool: "true or false"}


def _kind(value: Any) -> str:
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text", list: "a list",
             dict: "a section", type(None): "nothing"}  # fmt: skip
    return names.get(type(value), type(value).__name__)


def _join(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
