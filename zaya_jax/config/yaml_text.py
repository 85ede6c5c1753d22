"""Parse and write YAML, in bounded time and memory even for hostile text."""

from typing import Any

import yaml

from zaya_jax.config.checks import shown
from zaya_jax.errors import InputError

MAX_BYTES = 256 * 1024  # of a file; the parser reads about 100 kB/s
_MAX_DEPTH = 50
_MAX_VALUES = 20_000  # or a quarter of the characters, in a long text
_BREAKS = "\x85\u2028\u2029"  # YAML 1.1 treats these as line breaks, so an unquoted scalar would lose them


def parse_yaml(text: str, source: str) -> Any:
    """Parse YAML 1.1 without tags and merge keys; `source` is the subject of messages ("The configuration run.yaml").

    `InputError` if the text is not YAML, repeats a key, or exceeds the limits on depth and number of values.
    """
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506 (a SafeLoader)
    except InputError as error:
        raise InputError(f"{source} is invalid. {error}") from error
    except (yaml.YAMLError, ValueError) as error:  # an impossible date or number is a ValueError
        reason = " ".join(str(error).replace(' in "<unicode string>",', " at").split())
        raise InputError(f"{source} is not valid YAML: {reason[:300]}.") from error


def dump_yaml(tree: Any) -> str:
    """Write plain values as YAML that `parse_yaml` reads back unchanged, including the order of keys."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


class _Dumper(yaml.SafeDumper):
    """Writes text so that YAML 1.1 reads back the same."""


def _represent_text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    style = '"' if any(character in value for character in _BREAKS) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style)


_Dumper.add_representer(str, _represent_text)


class _Loader(yaml.SafeLoader):
    """A safe loader that rejects repeated keys, deep nesting and exploding aliases."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = self._values = 0
        self._most = max(_MAX_VALUES, len(stream) // 4)
        self._sizes: dict[int, int] = {}  # id of a finished node → number of values in it

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose a node; track its depth and the number of values with all aliases expanded."""
        is_alias, line, before = self.check_event(yaml.AliasEvent), self.peek_event().start_mark.line + 1, self._values
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise InputError(f"Line {line} nests more than {_MAX_DEPTH} levels deep.")
        node = super().compose_node(parent, index)
        self._depth -= 1
        if is_alias and id(node) not in self._sizes:
            raise InputError(f"The alias on line {line} refers to a value that contains it.")
        self._values += self._sizes[id(node)] if is_alias else 1
        if self._values > self._most:
            raise InputError(f"By line {line} it has more than {self._most:,} values, with aliases expanded.")
        self._sizes[id(node)] = self._values - before
        return node


def _construct_mapping(loader: _Loader, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
    seen = set()
    for key_node, _ in node.value:
        line, key = key_node.start_mark.line + 1, loader.construct_object(key_node, deep=deep)
        if type(key) is int:  # the index of a list item, as in `phases: {0: {…}}`
            key_node.tag, key_node.value = "tag:yaml.org,2002:str", shown(key)
            key = key_node.value
            loader.constructed_objects[key_node] = key
        if not isinstance(key, str):
            typed = f"key {key_node.value!r}" if isinstance(key_node, yaml.ScalarNode) else "key"
            must = "but it must be a name; put it in quotes."
            raise InputError(f"YAML reads the {typed} on line {line} as {kind(key)}, {must}")
        if key in seen:
            raise InputError(f"The key {shown(key)} appears twice; the second one is on line {line}.")
        seen.add(key)
    return yaml.SafeLoader.construct_mapping(loader, node, deep=True)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _construct_mapping)


def kind(value: Any) -> str:
    """Name the type of a value in YAML's words, with an article."""
    names = {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "text", "dict": "a section"}
    names |= {"list": "a list", "NoneType": "null", "bytes": "binary data", "datetime": "a date with a time"}
    return names.get(type(value).__name__, f"a {type(value).__name__}")
