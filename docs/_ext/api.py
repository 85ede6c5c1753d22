"""The API reference, from docstrings."""

import inspect
import re
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import zaya_jax

ROOT = Path(__file__).parent.parent.parent
# Modules that import an optional library when they are imported.
_OPTIONAL = {"zaya_jax.evaluate.lm_eval_model", "zaya_jax.train.sinks.tensorboard", "zaya_jax.train.sinks.wandb"}
_ITEM = re.compile(r" *- ")
# Code in backticks, or a character that reStructuredText would interpret.
_MARKUP = re.compile(r"(`+)(.+?)\1|[*|\\]|(?<=\w)_(?!\w)", re.DOTALL)


def modules(package: str) -> list[str]:
    """Return the dotted names of a package's public modules that import without optional libraries.

    A package may be a single module.
    """
    folder = ROOT.joinpath(*package.split("."))
    files = [file.relative_to(ROOT).with_suffix("") for file in sorted(folder.rglob("*.py"))]
    names = [".".join(file.parts).removesuffix(".__init__") for file in files]
    return [name for name in names if "._" not in name and name not in _OPTIONAL] or [package]


def module_pages(package: str) -> str:
    """Return Markdown that documents the public members of a package's modules."""
    return "\n".join(_section(name) for name in modules(package) if _members(import_module(name)))


def front_door() -> str:
    """Return a table of what `zaya_jax` exports, with links."""
    rows = ["| name | what it is |", "|---|---|"]
    for name in zaya_jax._HOMES:
        value = getattr(zaya_jax, name)
        rows.append(f"| {{py:obj}}`{name} <{value.__module__}.{name}>` | {inspect.getdoc(value).splitlines()[0]} |")
    return "\n".join(rows)


def _section(name: str) -> str:
    return f"## `{name}`\n\n```{{eval-rst}}\n.. automodule:: {name}\n   :members:\n```\n"


def _members(module: ModuleType) -> bool:
    """Return whether a module defines a public name with a docstring."""
    return any(
        not name.startswith("_") and getattr(value, "__module__", "") == module.__name__ and value.__doc__
        for name, value in vars(module).items()
    )


def to_rst(app: Any, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Turn the Markdown of a docstring into reStructuredText, in place (event `autodoc-process-docstring`)."""
    spaced: list[str] = []
    for line in lines:
        before = spaced[-1] if spaced else ""
        if _ITEM.match(line) and before.strip() and not _ITEM.match(before) and _indent(before) <= _indent(line):
            spaced.append("")  # before the first item of a list
        spaced.append(line)
    lines[:] = _MARKUP.sub(_replace, "\n".join(spaced)).splitlines()


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _replace(match: re.Match[str]) -> str:
    if match[1]:
        return f"``{match[2].strip('`')}``\\ " if len(match[1]) == 1 else match[0]
    return f"\\{match[0]}"


def skip_field(app: Any, what: str, name: str, value: Any, skip: bool, options: Any) -> bool | None:
    """Leave out fields of named tuples, whose generated docstrings say nothing (event `autodoc-skip-member`)."""
    return True if (getattr(value, "__doc__", None) or "").startswith("Alias for field number") else None
