"""The keys that overrides can set, for shell completion."""

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from zaya_jax.config.schema import Config
from zaya_jax.config.table import Table


def override_keys(tree: Mapping[str, Any], cls: Any = Config, where: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each leaf key, such as `train.batch.tokens`, and the type of its value.

    Args:
      tree: a configuration as `to_dict` returns it, for the names of phases and sources; {} leaves these out.
      cls: the dataclass of the section.
      where: the section's prefix.
    """
    for name, hint in typing.get_type_hints(cls).items():
        kinds, value, key = (hint, *typing.get_args(hint)), tree.get(name), f"{where}{name}"
        section = next((kind for kind in kinds if dataclasses.is_dataclass(kind)), None)
        if section is None:
            yield key, hint
        elif typing.get_origin(hint) is tuple:
            for index, item in enumerate(value or []):
                yield from override_keys(item, section, f"{key}.{item.get('name', index)}.")
        elif typing.get_origin(hint) is Table:
            for item_name, item in (value or {}).items():
                yield from override_keys(item, section, f"{key}.{item_name}.")
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
