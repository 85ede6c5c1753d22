"""Every tensor of a `transformers` ZAYA folder and the parameter that it is here (zaya1.md §12.1)."""

from collections.abc import Iterator
from typing import NamedTuple

from zaya_jax.config import ModelConfig
from zaya_jax.model.hf_names import Change
from zaya_jax.model.router import is_inert
from zaya_jax.model.zaya import Block, Zaya


class Tensor(NamedTuple):
    """One tensor of the folder."""

    name: str  # there
    path: tuple[str | int, ...]  # attributes that lead to the parameter; the position in the period follows 'blocks'
    group: int | None  # index in the parameter's stack, None where it is not stacked
    shape: tuple[int, ...]  # there
    to_ours: Change  # from the layout there to the one here, and back
    to_theirs: Change
    part: slice | None = None  # of the parameter that it fills, along the first axis behind the stack

    @property
    def leaf(self) -> str:
        """The parameter's flat name (`model.tree`)."""
        return ".".join(map(str, self.path))


def tensors(config: ModelConfig) -> Iterator[Tensor]:
    """Every tensor of a folder with this architecture, as the modules list them."""
    for row in Zaya.hf_tensors(config):
        yield Tensor(row.name, row.path, None, *row[2:])
    for index in range(config.num_layers):
        group, position = divmod(index, len(config.period))
        for row in Block.hf_tensors(config, config.layer_kinds[position]):
            tensor = Tensor(f"model.layers.{index}.{row.name}", ("blocks", position, *row.path), group, *row[2:])
            if not is_inert(tensor.leaf, group):
                yield tensor
