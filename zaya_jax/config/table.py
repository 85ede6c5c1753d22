"""An immutable mapping, so that configurations are hashable."""

from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Table(Mapping[str, Value], Generic[Value]):
    """An immutable, ordered mapping; tables are equal if their items are, in the same order."""

    def __init__(self, entries: Mapping[str, Value] | None = None) -> None:
        self._entries = dict(entries or {})

    def __getitem__(self, name: str) -> Value:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Table) and list(self.items()) == list(other.items())

    def __hash__(self) -> int:
        return hash(tuple(self.items()))

    def __repr__(self) -> str:
        return f"Table({self._entries!r})"
