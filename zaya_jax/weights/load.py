"""Open weights from any source: a run, RUN_DIR@PHASE, a checkpoint, adapters on their base, or hf:FOLDER."""

import functools
import json
import os
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from zaya_jax.config import LoraConfig
from zaya_jax.config.weight_source import HF, hf_folder
from zaya_jax.data.tokenizer import Tokenizer
from zaya_jax.errors import InputError
from zaya_jax.hf.exporter import Read
from zaya_jax.model.fingerprint import combine_sums, part_sums
from zaya_jax.model.lora import ADAPTED, Adapted, adapter_names, merge
from zaya_jax.model.tree import Arrays, abstract_weights, compute_dtypes, is_balancing_bias, is_stacked, roles
from zaya_jax.model.zaya import Zaya, abstract_model
from zaya_jax.ops.precision import accumulation_dtype
from zaya_jax.run.checkpoints import checkpoint_folder
from zaya_jax.run.files import expanded, read_json, write_atomically
from zaya_jax.run.tokenizer import run_tokenizer
from zaya_jax.weights.sources import CheckpointWeights, FolderWeights, Weights, stack_groups

BASE = "base.json"  # in the run folder of adapters: fingerprint of the base model


def open_weights(source: str | Path, key: str = "path", base: str | None = None) -> Weights:
    """Open weights without reading their values.

    The `source` is RUN_DIR for its newest checkpoint, RUN_DIR@PHASE for the last one of a phase,
    RUN_DIR/checkpoints/STEP, or hf:FOLDER for a `transformers` folder; messages call it `key`, the key or argument
    that it comes from. `base` is the base model of adapters; None uses `init_from` of their run. `InputError` if the
    source does not exist, or its metadata shows damage.
    """
    if hf_folder(str(source)) is not None:
        return FolderWeights(source)
    if is_transformers(source):
        raise InputError(f"{key} is {str(source)!r}, which looks like a transformers folder; write {HF}{source}.")
    checkpoint = CheckpointWeights(source, key)
    return AdaptedWeights(checkpoint, base) if checkpoint.holds_adapters else checkpoint


def is_transformers(source: str | Path) -> bool:
    """Return whether a source is hf:FOLDER, or a `transformers` folder that is named without hf:."""
    return hf_folder(str(source)) is not None or os.path.isfile(expanded(source) / "config.json")


def load_model(source: str | Path, dtype: jax.typing.DTypeLike | None = jnp.float32) -> tuple[Zaya, Tokenizer | None]:
    """Load a model onto this process's first device, and its tokenizer or None if there is no `tokenizer.json`.

    Adapters are merged into their base model. See `open_weights` for `source`, `Weights.load_model` for `dtype`.
    `InputError` if the model is missing or damaged, or its tokenizer cannot be used.
    """
    weights = open_weights(source)
    tokenizer = weights.load_tokenizer()
    return weights.load_model(dtype), tokenizer


def tokenizer_folder(source: str) -> Path | None:
    """Return the tokenizer folder of a source without opening its weights; raises like `open_weights`."""
    folder = hf_folder(source)
    return run_tokenizer(checkpoint_folder(source)) if folder is None else expanded(folder)


class AdaptedWeights(Weights):
    """A checkpoint of adapters, merged while reading into its base model in the dtype of training."""

    holds_adapters = True

    def __init__(self, adapters: CheckpointWeights, base: str | None = None) -> None:
        """Merge `adapters` into `base`, or `init_from` of their run, which is opened on first use."""
        config = adapters.manifest.metadata["config"]
        try:
            self._base, self._base_key = base or config["init_from"], "--base" if base else "init_from"
            self.lora = LoraConfig(**config["lora"])  # rank and scale of the adapters
        except (KeyError, TypeError) as error:
            raise InputError(f"The manifest of {adapters.folder} does not describe its adapters: {error}.") from error
        self.source, self.folder, self.adapters = adapters.source, adapters.folder, adapters
        self.tokenizer = tokenizer_folder(self._base) if adapters.tokenizer is None else adapters.tokenizer
        self.config, compute_dtype = adapters.config, config["train"]["compute_dtype"]
        self.exact = accumulation_dtype(compute_dtype)  # of the run, fp32 or fp64
        self._roles = roles(abstract_model(self.config))
        vectors = dict.fromkeys(abstract_weights(self.config), self.exact)
        self.dtypes = vectors | compute_dtypes(self._roles, compute_dtype)

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the base model, as the run recorded it."""
        return read_base_fingerprint(self.folder.parent.parent)

    @functools.cached_property
    def base(self) -> Weights:
        """The base model; its fingerprint is not checked yet, see `read_base`."""
        return open_weights(self._base, self._base_key)

    @functools.cached_property
    def read_base(self) -> Read:
        """A function that reads the base model in the dtype of training; InputError if its fingerprint differs."""
        base = self.base

        def read(name: str, group: int | None) -> np.ndarray:
            return base.read(name, group).astype(self.dtypes[name])

        trained_on, sums = self.fingerprint, {}
        for name, x in abstract_weights(self.config).items():
            parts = ((group, read(name, group)) for group in stack_groups(name, x.shape))
            sums[name] = part_sums((0, part) if group is None else (group, part[None]) for group, part in parts)
        if trained_on != (actual := combine_sums(sums)):
            problem = f"its fingerprint is {actual}, not {trained_on}. Pass the right model with --base."
            raise InputError(f"{base.source} is not the base model of the adapters in {self.folder}: {problem}")
        return read

    def read(self, name: str, group: int | None) -> np.ndarray:
        """See `Weights.read`; balancing biases come from the adapters' run."""
        if is_balancing_bias(name):
            return self.adapters.read(name, group)
        if self._roles[name] not in ADAPTED:
            return self.read_base(name, group)
        a, b = (jnp.asarray(self.adapters.read(adapter, group)) for adapter in adapter_names(name))
        matrices = Adapted(jnp.asarray(self.read_base(name, group)), a, b, self.lora.scale)
        # One expert at a time: fp32 sums of a whole layer would need more memory than the layer.
        return np.asarray(jax.lax.map(merge, matrices) if a.ndim > 2 else merge(matrices))

    def load(self, abstract: Mapping[str, jax.ShapeDtypeStruct]) -> Arrays:
        """See `Weights.load`; merges on the host, one parameter at a time."""
        self.verify()

        def load(name: str, x: jax.ShapeDtypeStruct) -> jax.Array:
            groups = [self.read(name, group) for group in stack_groups(name, x.shape)]
            value = np.stack(groups) if is_stacked(name) else groups[0]
            return jax.device_put(value.astype(x.dtype), x.sharding)

        return {name: load(name, x) for name, x in abstract.items()}

    def verify(self) -> None:
        """See `Weights.verify`; the base model's fingerprint is checked when it is read."""
        self.adapters.verify()


def write_base_note(run: Path, init_from: str | None, fingerprint: str) -> None:
    """Record the base model of a run's adapters in its folder."""
    write_atomically(run / BASE, json.dumps({"init_from": init_from, "fingerprint": fingerprint}, indent=1) + "\n")


def read_base_fingerprint(run: Path) -> str:
    """Read the fingerprint of the base model of a run's adapters."""
    try:
        return read_json(run / BASE)["fingerprint"]
    except (InputError, KeyError, TypeError) as error:
        consequence = f"the base model of the adapters in {run} is unknown"
        raise InputError(f"{run / BASE} cannot be read, so {consequence}.") from error
