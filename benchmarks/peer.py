"""The other side of the step benchmarks: the ZAYA model of `transformers`, in PyTorch."""

import contextlib
import functools
import importlib
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from zaya_jax.config import Config, ModelConfig
from zaya_jax.errors import InputError, printable
from zaya_jax.hf.config import to_hf
from zaya_jax.lab.measure.timing import time_calls
from zaya_jax.lab.result import require_packages, rounded
from zaya_jax.lab.subprocesses import run_in_subprocess

ROWS = (1, 2, 4, 8)  # micro-batch sizes to try
Pass = Callable[[Any, int], Any]  # (tokens of some rows, rows of the whole batch) → loss
Wait = Callable[[], object]


def require_peer() -> None:
    """Raise `InputError` unless a process of its own can import the model, before anything else is timed."""
    require_packages("parity", "torch", "transformers")
    with run_in_subprocess(_import_peer):
        pass


def _import_peer() -> Callable[[], object]:
    try:
        importlib.import_module("torch")
        return importlib.import_module("transformers").ZayaForCausalLM
    except (ImportError, AttributeError, RuntimeError, OSError) as error:
        reason = f"ZayaForCausalLM of transformers, which cannot be imported: {printable(str(error))}"
        message = f"The comparison needs {reason}. Install what is missing: pip install -e '.[parity]'."
        raise InputError(message) from error


def peer_device() -> str:
    """Return PyTorch's name for the device that JAX uses; it names ROCm devices 'cuda', too."""
    from zaya_jax.ops.target import current_target  # not in the peer's process, since it imports jax

    return "cpu" if current_target().platform == "cpu" else "cuda"


def peer_step(config: ModelConfig, dtype: str, tokens_bs: np.ndarray, device: str, threads: int) -> Callable[[], float]:
    """Make a function that runs one forward and backward pass on `device` ('cpu', 'cuda') and returns the loss."""
    torch, model = _make_model(config, dtype, device, threads)
    tokens = torch.tensor(tokens_bs, device=device)

    def step() -> float:
        model.zero_grad(set_to_none=True)
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        return loss.item()

    return step


def time_peer(config: Config, tokens_bs: np.ndarray, device: str, threads: int, repeats: int) -> dict[str, Any]:
    """Time steps of PyTorch's fused AdamW on all of `tokens_bs`, after one warm-up step, all in the compute dtype.

    Gradients are clipped. Micro-batch size and activation checkpointing are those of the fastest pass that fits;
    InputError if none does. Returns seconds, losses, memory, and the settings that were used.
    """
    torch, model = _make_model(config.model, config.train.compute_dtype, device, threads)
    adamw = config.optimizer.adamw
    settings = adamw.learning_rate, (adamw.b1, adamw.b2), adamw.eps, adamw.weight_decay
    optimizer = torch.optim.AdamW(model.parameters(), *settings, fused=True)
    tokens = torch.tensor(tokens_bs, device=device)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None

    def one_pass(rows: Any, of: int) -> Any:
        loss = model(rows, labels=rows, use_cache=False).loss * (len(rows) / of)
        loss.backward()
        return loss.detach()

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    checkpointing, rows = _fastest(torch, model, tokens, one_pass, update, wait)
    _set_checkpointing(model, checkpointing)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    losses = []

    def one_step() -> None:
        loss = sum(one_pass(part, len(tokens)) for part in tokens.split(rows))
        update()
        wait()
        losses.append(round(float(loss), 4))

    seconds = time_calls(one_step, repeats).seconds
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
    settings, timed = {"micro_batch": rows, "checkpointing": checkpointing}, {"step": rounded(seconds)}
    return {**settings, "seconds": timed, "losses": losses, "peak_bytes": peak}


def _make_model(config: ModelConfig, dtype: str, device: str, threads: int) -> tuple[Any, Any]:
    """Return the module torch, and the model with the defaults of `transformers`: sdpa, default experts.

    Key temperatures are 1, since with their initial value of 0 all keys would vanish.
    """
    # Optional dependencies, imported by name.
    torch, transformers = (importlib.import_module(name) for name in ("torch", "transformers"))
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    tree = to_hf(config, dtype)
    tree.pop("architectures")
    peer_config = transformers.ZayaConfig(**tree, attn_implementation="sdpa")
    with torch.device(device):  # drawing billions of parameters on the host is slow
        model = transformers.ZayaForCausalLM(peer_config).to(device, getattr(torch, dtype))
    for layer in model.model.layers:
        layer.self_attn.qk_norm.temp.data.fill_(1.0)
        layer.mlp.gate.balancing_biases.data = layer.mlp.gate.balancing_biases.data.float()
    return torch, model


def _fastest(torch: Any, model: Any, tokens: Any, one_pass: Pass, update: Wait, wait: Wait) -> tuple[bool, int]:
    """Return the fastest settings that fit: whether to checkpoint activations, and the micro-batch size."""
    speeds: dict[tuple[bool, int], float] = {}  # in sequences/s
    _set_checkpointing(model, True)
    with contextlib.suppress(torch.OutOfMemoryError):
        one_pass(tokens[:1], 1)
        update()  # allocates the moments before trying what else fits
        for checkpointing, rows in itertools.product((False, True), ROWS):
            if len(tokens) % rows == 0:
                _set_checkpointing(model, checkpointing)
                with contextlib.suppress(torch.OutOfMemoryError):
                    one = functools.partial(one_pass, tokens[:rows], rows)
                    speeds[checkpointing, rows] = rows / time_calls(lambda one=one: (one(), wait()), 1).median
    model.zero_grad(set_to_none=True)
    if not speeds:
        problem = "The transformers model and its AdamW state do not fit in this device's memory"
        raise InputError(f"{problem}. Choose a smaller model with --config FILE model.num_layers=N.")
    return max(speeds, key=speeds.__getitem__)


def _set_checkpointing(model: Any, checkpointing: bool) -> None:
    if checkpointing:
        model.activation_checkpointing_enable()
    else:
        model.activation_checkpointing_disable()


def peer_decode(
    config: ModelConfig, dtype: str, prompts: np.ndarray, new: int, device: str, threads: int
) -> Callable[[], int]:
    """Make a function that generates `new` tokens greedily after each prompt, and returns the last one."""
    torch, model = _make_model(config, dtype, device, threads)
    model.eval()
    tokens = torch.tensor(prompts, device=device)

    def step() -> int:
        with torch.no_grad():
            lengths = {"max_new_tokens": new, "min_new_tokens": new, "pad_token_id": 0}
            out = model.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False, **lengths)
        return int(out[-1, -1])

    return step
