"""Where weights can come from: a checkpoint, or a `transformers` folder; opened first, read when asked for."""

import abc
from collections.abc import Mapping, Sequence
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
from zaya_jax.hf.finite import is_finite, not_finite
from zaya_jax.hf.folder import open_folder
from zaya_jax.hf.importer import read_parameters
from zaya_jax.hf.tensors import Tensor
from zaya_jax.model.router import is_inert
from zaya_jax.model.tree import Arrays, abstract_weights, is_balancing_bias, is_stacked, with_values
from zaya_jax.model.zaya import Zaya, abstract_model
from zaya_jax.ops.precision import accumulation_dtype
from zaya_jax.run.tokenizer import run_tokenizer

PARAMETERS_ONLY = "parameters_alone"  # in the metadata of a checkpoint without an optimizer's state
WEIGHTS = ("params.", "balance.")  # what the names of a model's arrays in a checkpoint start with


class Weights(abc.ABC):
    """The weights of a model on disk.

    Attributes:
      source: what was opened, as the user named it.
      folder: of the checkpoint, or of `transformers`.
      tokenizer: folder of the tokenizer and generation files; None where there is none.
      config: the architecture, with the positions of the phase it was saved in.
      dtypes: of each parameter and balancing bias as `read` gives it, by name.
      holds_adapters: whether what was opened is a checkpoint of adapters.
      optimizer_config: the configuration of the run whose optimizer's state `load_state` gives; None where there is
        none.
    """

    source: str
    folder: Path
    tokenizer: Path | None
    config: ModelConfig
    dtypes: Mapping[str, Any]
    holds_adapters: bool = False
    optimizer_config: dict[str, Any] | None = None

    @abc.abstractmethod
    def read(self, name: str, group: int | None) -> np.ndarray:
        """A parameter or balancing bias, or where `group` is given the item of its stack."""

    @abc.abstractmethod
    def load(self, abstract: Mapping[str, jax.ShapeDtypeStruct]) -> Arrays:
        """Parameters and balancing biases on devices.

        Args:
          abstract: shape, dtype and sharding of each one that is wanted, by name.

        Raises:
          InputError: they are damaged, of another architecture, or NaN or infinite somewhere.
        """

    def load_state(self, abstract: Mapping[str, Any]) -> dict[str, Any]:
        """What is here of a training state, on devices.

        Args:
          abstract: of `params`, `balance`, `opt_state` and `balance_state` shape, dtype and sharding of each leaf.

        Returns:
          `params` and `balance`, and the other two where there is an `optimizer_config`.

        Raises:
          InputError: see `load`; or the optimizer's state has other arrays.
        """
        kinds = {kind: abstract[kind] for kind in ("params", "balance")}
        values = self.load({name: x for kind in kinds.values() for name, x in kind.items()})
        return {kind: {name: values[name] for name in wanted} for kind, wanted in kinds.items()}

    def verify(self) -> None:  # noqa: B027 (a folder has no checksums)
        """Raise `InputError` where a checksum does not match; `load` does that, too, and `read` does not."""

    def load_model(self, dtype: jax.typing.DTypeLike | None) -> Zaya:
        """The model on this process's first device.

        Args:
          dtype: of the parameters; as they are stored where None. Balancing biases are fp32 (fp64 beside fp64).
        """
        device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        exact = accumulation_dtype(self.dtypes["embedding"] if dtype is None else dtype)

        def placed(name: str, shape: Sequence[int]) -> jax.ShapeDtypeStruct:
            kind = self.dtypes.get(name, exact) if dtype is None else dtype
            return jax.ShapeDtypeStruct(shape, exact if is_balancing_bias(name) else kind, sharding=device)

        abstract = {name: placed(name, x.shape) for name, x in abstract_weights(self.config).items()}
        return with_values(abstract_model(self.config), self.load(abstract))

    def load_tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None where there is no `tokenizer.json`."""
        path = None if self.tokenizer is None else self.tokenizer / "tokenizer.json"
        if path is None or not path.is_file():
            return None
        special = find_special_tokens(path, chat=False, eot=None, bos=None)
        return load_tokenizer(path, special.eot, special.bos)


class CheckpointWeights(Weights):
    """A checkpoint that holds all parameters, or the adapters of `AdaptedWeights`.

    Attributes:
      manifest, reader: of the checkpoint.
    """

    def __init__(self, source: str, folder: Path) -> None:
        """Open the checkpoint in `folder`; InputError where its manifest or a file is damaged."""
        self.source, self.folder, self.tokenizer = source, folder, run_tokenizer(folder)
        self.manifest, self.reader = open_checkpoint(folder)
        metadata = self.manifest.metadata
        self.config, self.holds_adapters = model_config(metadata), metadata["config"].get("lora") is not None
        self.optimizer_config = None if PARAMETERS_ONLY in metadata else metadata["config"]
        saved = {name: leaf["dtype"] for name, leaf in self.manifest.leaves.items() if name.startswith(WEIGHTS)}
        try:
            self.dtypes = {name.partition(".")[2]: jnp.dtype(dtype) for name, dtype in saved.items()}
        except TypeError as error:
            raise InputError(f"An array in {folder} has an unknown dtype: {error}.") from error

    def read(self, name: str, group: int | None) -> np.ndarray:
        """See `Weights.read`; an adapter, too, by its name."""
        return self.reader.read(saved_name(name), () if group is None else (group,))

    def load(self, abstract: Mapping[str, jax.ShapeDtypeStruct]) -> Arrays:
        """See `Weights.load`; each process reads what its devices hold, in the stored dtype, and casts it there."""
        stored = {
            saved_name(name): jax.ShapeDtypeStruct(x.shape, self.dtypes.get(name, x.dtype), sharding=x.sharding)
            for name, x in abstract.items()
        }
        arrays = self._restore(stored)

        def cast(arrays: Arrays) -> tuple[Arrays, Arrays]:
            values = {name: arrays[saved_name(name)].astype(x.dtype) for name, x in abstract.items()}
            return values, {name: jnp.isfinite(x).all() for name, x in values.items()}

        placed = {name: x.sharding for name, x in abstract.items()}
        values, finite = jax.jit(cast, out_shardings=(placed, None))(arrays)
        for name, good in jax.device_get(finite).items():
            if not good:
                raise InputError(f"The parameter {name} in {self.folder} has NaN or infinite values; take an earlier "
                                 "checkpoint.")  # fmt: skip
        return values

    def load_state(self, abstract: Mapping[str, Any]) -> dict[str, Any]:
        """See `Weights.load_state`; with the optimizer's, all as it was saved."""
        return super().load_state(abstract) if self.optimizer_config is None else self._restore(dict(abstract))

    def _restore(self, abstract: dict[str, Any]) -> dict[str, Any]:
        return read_checkpoint(self.folder, lambda _: abstract, part=True, manifest=self.manifest).state

    def verify(self) -> None:
        """See `Weights.verify`."""
        if damage := verify_checkpoint(self.folder):
            raise InputError(damage[0])


class FolderWeights(Weights):
    """A `transformers` folder in either layout."""

    def __init__(self, source: str, folder: Path) -> None:
        """Open `folder`; InputError as `open_folder`."""
        self._opened = open_folder(folder)
        self.source, self.folder, self.tokenizer = source, self._opened.path, self._opened.path
        self.config = self._opened.config
        self._tensors: dict[tuple[str, int | None], list[Tensor]] = {}
        dtypes: dict[str, Any] = {}
        for tensor in self._opened.tensors:
            self._tensors.setdefault((tensor.leaf, tensor.group), []).append(tensor)
            stored = self._opened.stored[tensor.name].dtype
            # One that holds all layers.
            dtypes[tensor.leaf] = jnp.promote_types(dtypes.get(tensor.leaf, stored), stored)
        self.dtypes = dict.fromkeys(abstract_weights(self.config), dtypes["embedding"]) | dtypes

    def read(self, name: str, group: int | None) -> np.ndarray:
        """See `Weights.read`; mapped from its file, where it lies in one piece."""
        if is_inert(name, group):  # and so in no folder
            return np.ones(self.config.router_size, np.float32)
        tensors = self._tensors[name, group]
        values = [tensor.to_ours(self._opened.stored[tensor.name].open()) for tensor in tensors]
        return values[0] if tensors[0].part is None else np.concatenate(values)  # experts, each in a tensor, in order

    def check_finite(self, name: str, group: int | None, dtype: np.dtype, remedy: str) -> None:
        """Raise `InputError` where a tensor of what `read` gives is NaN or infinite in `dtype`; see `not_finite`."""
        for tensor in self._tensors.get((name, group), ()):
            stored = self._opened.stored[tensor.name].open()
            with np.errstate(over="ignore"):
                finite = is_finite(stored.astype(dtype, copy=False))
            if not finite:
                raise not_finite(f"The tensor {tensor.name} in {self.folder}", stored, dtype, remedy)

    def load(self, abstract: Mapping[str, jax.ShapeDtypeStruct]) -> Arrays:
        """See `Weights.load`."""
        return read_parameters(self._opened, abstract)


def saved_name(name: str) -> str:
    """The name in a checkpoint of a parameter, an adapter or a balancing bias."""
    return f"{'balance' if is_balancing_bias(name) else 'params'}.{name}"


def stack_groups(name: str, shape: Sequence[int]) -> Sequence[int | None]:
    """What `Weights.read` takes as `group`, one after another, for the whole of a parameter."""
    return range(shape[0]) if is_stacked(name) else (None,)


def model_config(metadata: Mapping[str, Any]) -> ModelConfig:
    """The architecture of a checkpoint by its metadata, with the positions of its phase.

    Raises:
      InputError: the metadata does not describe it.
    """
    try:
        model, phases = metadata["config"]["model"], metadata["config"].get("phases", ())
        phase = next((phase for phase in phases if phase["name"] == metadata.get("phase")), {})
        base = phase.get("rope_base")
        return model_from_dict(model if base is None else model | {"rope_base": base})
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError("The manifest of the checkpoint does not say which model it holds.") from error
