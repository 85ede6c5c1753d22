"""Where weights can come from: a checkpoint, or a `transformers` folder; opened first, read when asked for."""

import abc
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zaya_jax.checkpoint.inspection import open_checkpoint
from zaya_jax.checkpoint.reader import verify_checkpoint
from zaya_jax.checkpoint.restore import read_checkpoint
from zaya_jax.config import ModelConfig, model_from_dict
from zaya_jax.data.special_tokens import find_special_tokens
from zaya_jax.data.tokenizer import Tokenizer, load_tokenizer
from zaya_jax.errors import InputError
from zaya_jax.hf.checkpoint import PARAMETERS_ONLY, saved_name
from zaya_jax.hf.folder import open_folder
from zaya_jax.hf.importer import read_parameters
from zaya_jax.hf.tensors import Tensor, is_bias
from zaya_jax.model.router import INERT
from zaya_jax.model.tree import Arrays, balancing_biases, parameters, with_values
from zaya_jax.model.zaya import Zaya, abstract_model
from zaya_jax.ops.precision import accumulation_dtype
from zaya_jax.run.manifest import Damaged
from zaya_jax.run.tokenizer import run_tokenizer

Read = Callable[[str, int | None], np.ndarray]  # see `Weights.read`


class Weights(abc.ABC):
    """The weights of a model on disk.

    Attributes:
      source: what was opened, as the user named it.
      folder: of the checkpoint, or of `transformers`.
      tokenizer: folder of the tokenizer and generation files; None where there is none.
      has_optimizer: whether the optimizer's state is there, too.
    """

    source: str
    folder: Path
    tokenizer: Path | None
    has_optimizer: bool = False

    @property
    @abc.abstractmethod
    def config(self) -> ModelConfig:
        """The architecture, with the positions of the phase it was saved in."""

    @property
    @abc.abstractmethod
    def dtypes(self) -> Mapping[str, Any]:
        """The dtype of each parameter and balancing bias as it is stored, by name."""

    @abc.abstractmethod
    def read(self, name: str, group: int | None) -> np.ndarray:
        """A parameter or balancing bias as it is stored, or where `group` is given the item of its stack."""

    @abc.abstractmethod
    def load(self, abstract: Mapping[str, jax.ShapeDtypeStruct]) -> Arrays:
        """Parameters and balancing biases on devices.

        Args:
          abstract: shape, dtype and sharding of each one that is wanted, by name.

        Raises:
          InputError: they are damaged, of another architecture, or NaN or infinite somewhere.
        """

    @abc.abstractmethod
    def verify(self) -> None:
        """Raise `InputError` where a checksum does not match; `load` does that, too, and `read` does not."""

    def load_model(self, dtype: jax.typing.DTypeLike | None) -> Zaya:
        """The model on this process's first device.

        Args:
          dtype: of the parameters; as they are stored where None. Balancing biases are fp32 (fp64 beside fp64).
        """
        device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        dtypes = self.dtypes if dtype is None else dict.fromkeys(self.dtypes, dtype)
        exact = accumulation_dtype(dtypes["embedding"])
        abstract = {
            name: jax.ShapeDtypeStruct(x.shape, exact if is_bias(name) else dtypes[name], sharding=device)
            for name, x in abstract_weights(self.config).items()
        }
        return with_values(abstract_model(self.config), self.load(abstract))

    def load_tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None where there is no `tokenizer.json`."""
        path = None if self.tokenizer is None else self.tokenizer / "tokenizer.json"
        if path is None or not path.is_file():
            return None
        special = find_special_tokens(path, chat=False, eot=None, bos=None)
        return load_tokenizer(path, special.eot, special.bos)


class CheckpointWeights(Weights):
    """A checkpoint that holds all parameters, or the adapters of `AdaptedWeights`."""

    def __init__(self, source: str, folder: Path) -> None:
        """Open the checkpoint in `folder`; InputError where its manifest or a file is damaged."""
        self.source, self.folder, self.tokenizer = source, folder, run_tokenizer(folder)
        self.manifest, self._reader = open_checkpoint(folder)
        self.has_optimizer = PARAMETERS_ONLY not in self.manifest.about

    @property
    def config(self) -> ModelConfig:
        """By the manifest; InputError where that does not say it."""
        return model_config(self.manifest.about)

    @property
    def dtypes(self) -> Mapping[str, Any]:
        """By the manifest."""
        leaves = self.manifest.leaves
        return {name: jnp.dtype(leaves[saved_name(name)]["dtype"]) for name in abstract_weights(self.config)}

    def read(self, name: str, group: int | None) -> np.ndarray:
        """An adapter, too, by its name."""
        return self.read_array(saved_name(name), () if group is None else (group,))

    def read_array(self, name: str, where: tuple[Any, ...]) -> np.ndarray:
        """An array by its name in the checkpoint, or the part of it at the index `where`."""
        try:
            return self._reader.read(name, where)
        except Damaged as error:
            raise InputError(str(error)) from error

    def load(self, abstract: Mapping[str, jax.ShapeDtypeStruct]) -> Arrays:
        """Each process reads what its devices hold, in the stored dtype, and casts there."""
        leaves, names = self.manifest.leaves, {saved_name(name): name for name in abstract}
        saved = {
            leaf: jax.ShapeDtypeStruct(
                abstract[name].shape, leaves.get(leaf, {"dtype": abstract[name].dtype})["dtype"],
                sharding=abstract[name].sharding,
            )
            for leaf, name in names.items()
        }  # fmt: skip
        arrays = read_checkpoint(self.folder, lambda _: saved, part=True).state

        def cast(arrays: Arrays) -> tuple[Arrays, Arrays]:
            values = {name: arrays[leaf].astype(abstract[name].dtype) for leaf, name in names.items()}
            return values, {name: jnp.isfinite(x).all() for name, x in values.items()}

        placed = {name: x.sharding for name, x in abstract.items()}
        values, finite = jax.jit(cast, out_shardings=(placed, None))(arrays)
        for name, good in jax.device_get(finite).items():
            if not good:
                raise InputError(f"The parameter {name} in {self.folder} has NaN or infinite values; take an earlier "
                                 "checkpoint.")  # fmt: skip
        return values

    def verify(self) -> None:
        """Reads all of the checkpoint."""
        if damage := verify_checkpoint(self.folder):
            raise InputError(damage[0])


class FolderWeights(Weights):
    """A `transformers` folder in either layout."""

    def __init__(self, source: str, folder: Path) -> None:
        """Open `folder`; InputError as `open_folder`."""
        self.source, self.folder, self.tokenizer = source, folder, folder
        self._opened = open_folder(folder)

    @property
    def config(self) -> ModelConfig:
        """By `config.json`."""
        return self._opened.config

    @functools.cached_property
    def _tensors(self) -> dict[tuple[str, int | None], list[Tensor]]:
        tensors: dict[tuple[str, int | None], list[Tensor]] = {}
        for tensor in self._opened.tensors:
            tensors.setdefault((tensor.leaf, tensor.group), []).append(tensor)
        return tensors

    @property
    def dtypes(self) -> Mapping[str, Any]:
        """Of each parameter one that holds those of all its layers."""
        dtypes: dict[str, Any] = {}
        for tensor in self._opened.tensors:
            stored = self._opened.stored[tensor.name].dtype
            dtypes[tensor.leaf] = jnp.promote_types(dtypes.get(tensor.leaf, stored), stored)
        return {INERT: dtypes["embedding"]} | dtypes

    def read(self, name: str, group: int | None) -> np.ndarray:
        """Mapped from its file, where it lies in one piece."""
        if (name, group) == (INERT, 0):  # inert, and in no folder
            return np.ones(self.config.router_size, np.float32)
        tensors = self._tensors[name, group]
        values = [tensor.to_ours(self._opened.stored[tensor.name].open()) for tensor in tensors]
        return values[0] if tensors[0].part is None else np.concatenate(values)  # experts, each in a tensor, in order

    def load(self, abstract: Mapping[str, jax.ShapeDtypeStruct]) -> Arrays:
        """Of the whole model and nothing less, see `read_parameters`."""
        return read_parameters(self._opened, abstract)

    def verify(self) -> None:
        """A folder has no checksums."""


@functools.lru_cache(maxsize=8)
def abstract_weights(config: ModelConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape of each parameter and balancing bias of a model, by name."""
    return jax.eval_shape(lambda model: {**parameters(model), **balancing_biases(model)}, abstract_model(config))


def stack_groups(name: str, shape: Sequence[int]) -> Sequence[int | None]:
    """What `Weights.read` takes as `group`, one after another, for the whole of a parameter."""
    return range(shape[0]) if name.startswith("blocks.") else (None,)


def model_config(metadata: Mapping[str, Any]) -> ModelConfig:
    """The architecture of a checkpoint by its metadata, with the positions of its phase.

    Raises:
      InputError: the metadata does not describe it.
    """
    try:
        config = metadata["config"]
        model = model_from_dict(config["model"])
        phase = next((phase for phase in config.get("phases", ()) if phase["name"] == metadata.get("phase")), {})
        return replace(model, rope_base=phase.get("rope_base") or model.rope_base)
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError("The manifest of the checkpoint does not say which model it holds.") from error
