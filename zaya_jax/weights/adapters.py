"""Adapters on the frozen parameters they were trained on: checked, and merged as they are read."""

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

BASE = "base.json"  # of a run with adapters: the fingerprint of the parameters they were trained on


class AdaptedWeights(Weights):
    """A checkpoint of adapters on its base: each matrix with its adapters added, in the dtype it was trained in.

    Attributes:
      adapters: the checkpoint itself.
      lora: rank and weight of the adapters.
      exact: dtype of sums in the run, fp32 or fp64.
    """

    def __init__(self, adapters: CheckpointWeights, lora: LoraConfig, open_base: Callable[[], Weights]) -> None:
        """Merge `adapters`; `open_base` opens what they were trained on, and is called when that is first read."""
        self.source, self.folder, self.tokenizer = adapters.source, adapters.folder, adapters.tokenizer
        self.adapters, self.holds_adapters, self.lora, self._open_base = adapters, True, lora, open_base
        self.config, compute_dtype = adapters.config, adapters.manifest.metadata["config"]["train"]["compute_dtype"]
        self.exact, self._roles = accumulation_dtype(compute_dtype), roles(abstract_model(self.config))
        vectors = dict.fromkeys(abstract_weights(self.config), self.exact)
        self.dtypes = vectors | compute_dtypes(self._roles, compute_dtype)

    @property
    def fingerprint(self) -> str:
        """That of the base, as the run recorded it."""
        return read_base_fingerprint(self.folder.parent.parent)

    @functools.cached_property
    def read_base(self) -> Read:
        """Reads the base in the dtype it was trained in; InputError unless it is what the adapters were trained on."""
        base = self._open_base()

        def read(name: str, group: int | None) -> np.ndarray:
            return base.read(name, group).astype(self.dtypes[name])

        trained_on, sums = self.fingerprint, {}
        for name, x in abstract_weights(self.config).items():
            sums[name] = part_sums((group or 0, read(name, group) if group is None else read(name, group)[None])
                                   for group in stack_groups(name, x.shape))  # fmt: skip
        if trained_on != (actual := combine_sums(sums)):
            raise InputError(f"{base.source} is not what the adapters in {self.folder} were trained on (fingerprint "
                             f"{actual}, not {trained_on}); name the right one with --base.")  # fmt: skip
        return read

    def read(self, name: str, group: int | None) -> np.ndarray:
        """See `Weights.read`; a balancing bias is that of the adapters' run."""
        if is_balancing_bias(name):
            return self.adapters.read(name, group)
        if self._roles[name] not in ADAPTED:
            return self.read_base(name, group)
        a, b = (jnp.asarray(self.adapters.read(adapter, group)) for adapter in adapter_names(name))
        matrices = Adapted(jnp.asarray(self.read_base(name, group)), a, b, self.lora.scale)
        # One expert at a time: the sums of a whole layer in fp32 would take more than the layer.
        return np.asarray(jax.lax.map(merge, matrices) if a.ndim > 2 else merge(matrices))

    def load(self, abstract: Mapping[str, jax.ShapeDtypeStruct]) -> Arrays:
        """See `Weights.load`; merged on the host, which holds one parameter at a time."""
        self.verify()

        def load(name: str, x: jax.ShapeDtypeStruct) -> jax.Array:
            groups = [self.read(name, group) for group in stack_groups(name, x.shape)]
            value = np.stack(groups) if is_stacked(name) else groups[0]
            return jax.device_put(value.astype(x.dtype), x.sharding)

        return {name: load(name, x) for name, x in abstract.items()}

    def verify(self) -> None:
        """See `Weights.verify`; the base is compared with its fingerprint when it is read."""
        self.adapters.verify()


def write_base_note(run: Path, init_from: str | None, fingerprint: str) -> None:
    """Record in a run folder what its adapters are trained on."""
    write_atomically(run / BASE, json.dumps({"init_from": init_from, "fingerprint": fingerprint}, indent=1) + "\n")


def read_base_fingerprint(run: Path) -> str:
    """The fingerprint of what a run's adapters are trained on; InputError where it cannot be read."""
    try:
        return read_json(run / BASE)["fingerprint"]
    except (InputError, KeyError, TypeError) as error:
        raise InputError(f"{run / BASE} cannot be read, so it is unknown what the adapters in {run} were trained on."
                         ) from error  # fmt: skip
