"""Sources of weights: checkpoints and `transformers` folders, opened first and read on demand."""

import abc
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zaya_jax.checkpoint.reader import open_checkpoint, verify_checkpoint
from zaya_jax.checkpoint.restore import read_checkpoint
from zaya_jax.config import ModelConfig, model_from_dict
from zaya_jax.config.weight_source import hf_folder
from zaya_jax.data.special_tokens import find_special_tokens
from zaya_jax.data.tokenizer import Tokenizer, load_tokenizer
from zaya_jax.errors import InputError
from zaya_jax.hf.finite import finite_cast
from zaya_jax.hf.folder import open_folder
from zaya_jax.hf.importer import read_parameters
from zaya_jax.model.router import is_inert
from zaya_jax.model.tree import Arrays, abstract_weights, is_balancing_bias, is_stacked, with_values
from zaya_jax.model.zaya import Zaya, abstract_model
from zaya_jax.ops.precision import accumulation_dtype
from zaya_jax.run.checkpoints import checkpoint_folder, suggest_older
from zaya_jax.run.tokenizer import run_tokenizer

PARAMETERS_ONLY = "parameters_alone"  # metadata key of checkpoints without optimizer state
WEIGHTS = ("params.", "balance.")  # name prefixes of a model's arrays in a checkpoint


class Weights(abc.ABC):
    """The weights of a model on disk."""

    source: str  # the source as the user named it
    folder: Path  # the checkpoint or the `transformers` folder
    tokenizer: Path | None  # folder of the tokenizer and generation files; None if there is none
    config: ModelConfig  # the architecture, with the RoPE base of the phase that saved it
    dtypes: Mapping[str, Any]  # dtype of each parameter and balancing bias that `read` returns, by name
    holds_adapters: bool = False  # whether the source is a checkpoint of adapters
    # configuration of the run whose optimizer state `load_state` returns; None without such state
    optimizer_config: dict[str, Any] | None = None

    @abc.abstractmethod
    def read(self, name: str, group: int | None) -> np.ndarray:
        """Read a parameter or balancing bias; `group` selects one layer of a stacked one."""

    @abc.abstractmethod
    def load(self, abstract: Mapping[str, jax.ShapeDtypeStruct]) -> Arrays:
        """Load parameters and balancing biases onto devices, with the shapes, dtypes and shardings of `abstract`.

        `InputError` if the weights are damaged, do not match the shapes, or contain NaN or infinite values.
        """

    def load_state(self, abstract: Mapping[str, Any]) -> dict[str, Any]:
        """Load `params` and `balance` of the training state `abstract` onto devices; raises like `load`.

        Also loads `opt_state` and `balance_state` if `optimizer_config` is set.
        """
        kinds = ("params", "balance")
        values = self.load({name: x for kind in kinds for name, x in abstract[kind].items()})
        return {kind: {name: values[name] for name in abstract[kind]} for kind in kinds}

    def verify(self) -> None:  # noqa: B027 (a folder has no checksums)
        """Raise `InputError` if a checksum does not match; `load` checks too, `read` does not."""

    def load_model(self, dtype: jax.typing.DTypeLike | None) -> Zaya:
        """Load the model onto this process's first device, with parameters of `dtype`, or the stored one if it is None.

        Balancing biases are fp32 (fp64 with fp64 parameters).
        """
        device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        exact = accumulation_dtype(self.dtypes["embedding"] if dtype is None else dtype)

        def placed(name: str, shape: Sequence[int]) -> jax.ShapeDtypeStruct:
            kind = self.dtypes.get(name, exact) if dtype is None else dtype
            return jax.ShapeDtypeStruct(shape, exact if is_balancing_bias(name) else kind, sharding=device)

        abstract = {name: placed(name, x.shape) for name, x in abstract_weights(self.config).items()}
        return with_values(abstract_model(self.config), self.load(abstract))

    def load_tokenizer(self) -> Tokenizer | None:
        """Load the tokenizer; None if there is no `tokenizer.json`."""
        path = None if self.tokenizer is None else self.tokenizer / "tokenizer.json"
        if path is None or not path.is_file():
            return None
        special = find_special_tokens(path, chat=False, eot=None, bos=None)
        return load_tokenizer(path, special.eot, special.bos)


class CheckpointWeights(Weights):
    """A checkpoint of all parameters, or of the adapters for `AdaptedWeights`; `reader` reads the arrays."""

    def __init__(self, source: str | Path, key: str) -> None:
        """Open a checkpoint that `key` names; InputError if there is none, or its manifest or a file is damaged."""
        self.source, self.folder = str(source), checkpoint_folder(str(source), key)
        self.tokenizer = run_tokenizer(self.folder)
        self.manifest, self.reader = open_checkpoint(self.folder)
        metadata = self.manifest.metadata
        self.config, self.holds_adapters = model_config(metadata), metadata["config"].get("lora") is not None
        self.optimizer_config = None if PARAMETERS_ONLY in metadata else metadata["config"]
        saved = {name: leaf["dtype"] for name, leaf in self.manifest.leaves.items() if name.startswith(WEIGHTS)}
        try:
            self.dtypes = {name.partition(".")[2]: jnp.dtype(dtype) for name, dtype in saved.items()}
        except TypeError as error:
            raise InputError(f"An array in {self.folder} has an unknown dtype: {error}.") from error

    def read(self, name: str, group: int | None) -> np.ndarray:
        """See `Weights.read`; also reads adapters by name."""
        return self.reader.read(saved_name(name), () if group is None else (group,))

    def load(self, abstract: Mapping[str, jax.ShapeDtypeStruct]) -> Arrays:
        """See `Weights.load`; each process reads its devices' shards in the stored dtype and casts them on device."""
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
                parameter = f"The parameter {name} in {self.folder}"
                raise InputError(f"{parameter} has NaN or infinite values; use an earlier checkpoint.")
        return values

    def load_state(self, abstract: Mapping[str, Any]) -> dict[str, Any]:
        """See `Weights.load_state`; returns the complete saved state if it includes the optimizer's."""
        return super().load_state(abstract) if self.optimizer_config is None else self._restore(abstract)

    def _restore(self, abstract: Mapping[str, Any]) -> dict[str, Any]:
        return read_checkpoint(self.folder, lambda _: dict(abstract), part=True, manifest=self.manifest).state

    def verify(self) -> None:
        """See `Weights.verify`."""
        if damage := verify_checkpoint(self.folder):
            raise InputError(f"{damage[0]}{suggest_older(self.folder)}")


class FolderWeights(Weights):
    """A `transformers` folder in either layout."""

    def __init__(self, source: str | Path) -> None:
        """Open FOLDER or hf:FOLDER; raises like `open_folder`."""
        folder = hf_folder(str(source))
        self._opened = open_folder(source if folder is None else folder)
        self.source, self.folder, self.tokenizer = str(source), self._opened.path, self._opened.path
        self.config, self.is_legacy = self._opened.config, self._opened.legacy
        dtypes: dict[str, Any] = {}
        for tensor in itertools.chain(*self._opened.tensors.values()):
            stored = self._opened.stored[tensor.name].dtype
            # Layers can differ in dtype; use one that can represent all of them.
            dtypes[tensor.leaf] = jnp.promote_types(dtypes.get(tensor.leaf, stored), stored)
        self.dtypes = dict.fromkeys(abstract_weights(self.config), dtypes["embedding"]) | dtypes

    def read(self, name: str, group: int | None) -> np.ndarray:
        """See `Weights.read`; memory-mapped if the parameter is a single tensor."""
        if is_inert(name, group):  # not stored in the folder
            return np.ones(self.config.router_size, np.float32)
        tensors = self._opened.tensors[name, group]
        values = [tensor.to_ours(self._opened.stored[tensor.name].open()) for tensor in tensors]
        return values[0] if tensors[0].part is None else np.concatenate(values)  # one tensor per expert, in order

    def check_finite(self, name: str, group: int | None, dtype: np.dtype, remedy: str) -> None:
        """Raise `InputError` if a tensor that `read` returns is not finite in `dtype`; see `finite_cast`."""
        for tensor in self._opened.tensors.get((name, group), ()):
            stored = self._opened.stored[tensor.name].open()
            finite_cast(stored, dtype, f"{tensor.name} in {self.folder}", remedy)

    def load(self, abstract: Mapping[str, jax.ShapeDtypeStruct]) -> Arrays:
        """See `Weights.load`."""
        return read_parameters(self._opened, abstract)


def saved_name(name: str) -> str:
    """Return the name in a checkpoint of a parameter, an adapter or a balancing bias."""
    return f"{'balance' if is_balancing_bias(name) else 'params'}.{name}"


def stack_groups(name: str, shape: Sequence[int]) -> Sequence[int | None]:
    """List the values of `group` with which `Weights.read` reads all of a parameter."""
    return range(shape[0]) if is_stacked(name) else (None,)


def model_config(metadata: Mapping[str, Any]) -> ModelConfig:
    """Return the architecture in a checkpoint's metadata, with the RoPE base of its phase; InputError without one."""
    try:
        model, phases = metadata["config"]["model"], metadata["config"].get("phases", ())
        phase = next((phase for phase in phases if phase["name"] == metadata.get("phase")), {})
        base = phase.get("rope_base")
        return model_from_dict(model if base is None else model | {"rope_base": base})
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError("The manifest of the checkpoint does not describe its model.") from error
