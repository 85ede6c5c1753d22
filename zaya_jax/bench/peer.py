"""The peer of the step benchmark: `transformers`' own ZAYA in PyTorch."""

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from zaya_jax.checkpoint.hf_config import to_hf
from zaya_jax.config import ModelConfig
from zaya_jax.errors import InputError


def peer_step(config: ModelConfig, dtype: str, tokens_bs: np.ndarray, device: str, threads: int) -> Callable[[], float]:
    """A function that does one forward and backward pass on `device` ('cpu', 'cuda') and returns the loss.

    The model is as `transformers` makes it (scaled-dot-product attention, its default experts), with key
    temperatures of 1, since its own start value of 0 would make all keys vanish.

    Raises:
      InputError: PyTorch or `transformers` is not installed.
    """
    try:  # imported by name, since no part of the package may need them
        torch: Any = importlib.import_module("torch")
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise InputError("The peer needs PyTorch and transformers: pip install -e '.[parity]'.") from error
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    tree = to_hf(config, dtype)
    tree.pop("architectures")
    config_there = transformers.ZayaConfig(**tree, attn_implementation="sdpa")
    model = transformers.ZayaForCausalLM(config_there).to(device, getattr(torch, dtype))
    for layer in model.model.layers:
        layer.self_attn.qk_norm.temp.data.fill_(1.0)
        layer.mlp.gate.balancing_biases.data = layer.mlp.gate.balancing_biases.data.float()
    tokens = torch.tensor(tokens_bs, device=device)

    def step() -> float:
        model.zero_grad(set_to_none=True)
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        return loss.item()

    return step
