"""ZAYA1 in JAX: pretrain, extend, fine-tune, inspect, evaluate and export.

Names are imported on first use, so that `import zaya_jax` is fast and does not import jax.

Shape suffixes used throughout the code:
  b batch, s sequence, d residual width, h query heads, k key/value heads, n = h + k heads of the convolution,
  g = h / k query heads per key head, c channels of a head, e experts, f expert width, r router width,
  v vocabulary, l layers, t tokens (b and s flattened), w rows of the convolution's tail.

For sums, statistics, the residual stream, master weights and gradients, docstrings write "fp32" for
`ops.precision.accumulation_dtype`, which is fp64 in a run that computes in fp64.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zaya_jax.config import Config as Config
    from zaya_jax.config import load_config as load_config
    from zaya_jax.generate.decode import generate_tokens as generate_tokens
    from zaya_jax.generate.engine import Engine as Engine
    from zaya_jax.generate.sampling import Sampling as Sampling
    from zaya_jax.generate.text import generate_text as generate_text
    from zaya_jax.hf.exporter import save_pretrained as save_pretrained
    from zaya_jax.model.capture import capture as capture
    from zaya_jax.model.capture import capture_shapes as capture_shapes
    from zaya_jax.model.redundancy import expert_redundancy as expert_redundancy
    from zaya_jax.model.zaya import ModelOutput as ModelOutput
    from zaya_jax.model.zaya import Zaya as Zaya
    from zaya_jax.model.zaya import logits as logits
    from zaya_jax.optim.muon import muon as muon
    from zaya_jax.train.fit import TrainResult as TrainResult
    from zaya_jax.train.fit import run_training as run_training
    from zaya_jax.weights.load import load_model as load_model

_NAMES = {
    "config": "Config load_config",
    "generate.decode": "generate_tokens",
    "generate.engine": "Engine",
    "generate.sampling": "Sampling",
    "generate.text": "generate_text",
    "hf.exporter": "save_pretrained",
    "model.capture": "capture capture_shapes",
    "model.redundancy": "expert_redundancy",
    "model.zaya": "ModelOutput Zaya logits",
    "optim.muon": "muon",
    "train.fit": "TrainResult run_training",
    "weights.load": "load_model",
}
_HOMES = {name: f"zaya_jax.{module}" for module, names in _NAMES.items() for name in names.split()}

__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"zaya_jax has no attribute {name!r}; it has {', '.join(_HOMES)}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
