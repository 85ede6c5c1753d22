"""Map every tensor of a `transformers` ZAYA folder to a parameter (docs/reference.md §12.1)."""

from collections.abc import Iterator
from typing import NamedTuple

from zaya_jax.config import ModelConfig
from zaya_jax.model.hf_names import Change
from zaya_jax.model.router import is_inert
from zaya_jax.model.zaya import Block, Zaya


class Tensor(NamedTuple):
    """One tensor of the folder and the parameter, or part of it, that it stores."""

    name: str  # in the folder
    path: tuple[str | int, ...]  # attribute path of the parameter; 'blocks' is followed by the position in the period
    group: int | None  # index in the parameter's stack; None if it is not stacked
    shape: tuple[int, ...]  # in the folder
    to_ours: Change  # converts the folder's layout to the parameter's
    to_theirs: Change  # the inverse
    part: slice | None = None  # of the parameter, along the first axis after the stack; None: all of it

    @property
    def leaf(self) -> str:
        """The parameter's flat name (`model.tree`)."""
        return ".".join(map(str, self.path))


def tensors(config: ModelConfig) -> Iterator[Tensor]:
    """List every tensor of a folder with this architecture."""
    for row in Zaya.hf_tensors(config):
        yield Tensor(row.name, row.path, None, *row[2:])
    for index in range(config.num_layers):
        group, position = divmod(index, len(config.period))
        for row in Block.hf_tensors(config, config.layer_kinds[position]):
            tensor = Tensor(f"model.layers.{index}.{row.name}", ("blocks", position, *row.path), group, *row[2:])
            if not is_inert(tensor.leaf, group):
                yield tensor
