"""Adapters merged into their frozen base model while reading; the base is checked by fingerprint."""

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from zaya_jax.config import LoraConfig
from zaya_jax.errors import InputError
from zaya_jax.hf.exporter import Read
from zaya_jax.model.fingerprint import combine_sums, part_sums
from zaya_jax.model.lora import ADAPTED, Adapted, adapter_names, merge
from zaya_jax.model.tree import Arrays, abstract_weights, compute_dtypes, is_balancing_bias, is_stacked, roles
from zaya_jax.model.zaya import abstract_model
from zaya_jax.ops.precision import accumulation_dtype
from zaya_jax.run.files import read_json, write_atomically
from zaya_jax.weights.sources import CheckpointWeights, Weights, stack_groups

BASE = "base.json"  # in the run folder of adapters: fingerprint of the base model


class AdaptedWeights(Weights):
    """A checkpoint of adapters merged into its base model, in the dtype of training.

    Attributes:
      adapters: the checkpoint of the adapters.
      lora: rank and scale of the adapters.
      exact: accumulation dtype of the run, fp32 or fp64.
    """

    def __init__(self, adapters: CheckpointWeights, lora: LoraConfig, open_base: Callable[[], Weights]) -> None:
        """Merge `adapters` into the base model, which `open_base` opens on first use."""
        self.source, self.folder, self.tokenizer = adapters.source, adapters.folder, adapters.tokenizer
        self.adapters, self.holds_adapters, self.lora, self._open_base = adapters, True, lora, open_base
        self.config, compute_dtype = adapters.config, adapters.manifest.metadata["config"]["train"]["compute_dtype"]
        self.exact, self._roles = accumulation_dtype(compute_dtype), roles(abstract_model(self.config))
        vectors = dict.fromkeys(abstract_weights(self.config), self.exact)
        self.dtypes = vectors | compute_dtypes(self._roles, compute_dtype)

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the base model, as the run recorded it."""
        return read_base_fingerprint(self.folder.parent.parent)

    @functools.cached_property
    def base(self) -> Weights:
        """The base model; its fingerprint is not checked yet, see `read_base`."""
        return self._open_base()

    @functools.cached_property
    def read_base(self) -> Read:
        """A function that reads the base model in the dtype of training; InputError if its fingerprint differs."""
        base = self.base

        def read(name: str, group: int | None) -> np.ndarray:
            return base.read(name, group).astype(self.dtypes[name])

        trained_on, sums = self.fingerprint, {}
        for name, x in abstract_weights(self.config).items():
            sums[name] = part_sums((group or 0, read(name, group) if group is None else read(name, group)[None])
                                   for group in stack_groups(name, x.shape))  # fmt: skip
        if trained_on != (actual := combine_sums(sums)):
            raise InputError(f"{base.source} is not the base model of the adapters in {self.folder}: its fingerprint "
                             f"is {actual}, not {trained_on}. Pass the right model with --base.")  # fmt: skip
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
        raise InputError(f"{run / BASE} cannot be read, so the base model of the adapters in {run} is unknown."
                         ) from error  # fmt: skip
