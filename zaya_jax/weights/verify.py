"""Whether the released 8B, read here, says what it says in `transformers` (zaya1.md §12.2)."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from zaya_jax.config import ModelConfig
from zaya_jax.errors import InputError
from zaya_jax.model.zaya import Zaya, logits
from zaya_jax.weights.load import open_folder_weights

# "Hello! How can I assist you today?", as the released tokenizer has it.
PROMPT = (2, 9259, 236888, 2088, 740, 564, 6361, 611, 3124, 236881, 106)
LIKELIEST = (105, 9731, 107, 740, 564, 1601, 611, 236881, 236881, 107, 107)
# Read here as the last three positions' logits of the last three classes, which no text uses.
TAIL = ((0.3613, 0.3633, 0.3633), (-1.3672,) * 3, (-2.875,) * 3)
# bf16 has 8 bits: steps of 0.016 at 2.875, and 40 layers in another order of additions.
TOLERANCE = 0.1
RELEASED_8B = ModelConfig(
    vocab_size=262_272, hidden_size=2048, num_layers=40, num_query_heads=8, num_kv_heads=2, head_dim=128,
    num_experts=16, expert_size=2048, router_size=256, max_positions=131_072,
)  # fmt: skip
_OF_NO_MATTER = ("max_positions", "init_std", "sliding_rope_base", "sliding_window")


class Verification(NamedTuple):
    """What came out.

    Attributes:
      likeliest: the token of the largest logit after each of `PROMPT`.
      tail: logits of the last three classes after the last three tokens.
      error: the largest difference of `tail` from `TAIL`.
      good: whether all tokens are `LIKELIEST` and `error` is at most `TOLERANCE`.
    """

    likeliest: tuple[int, ...]
    tail: tuple[tuple[float, ...], ...]
    error: float
    good: bool

    def __str__(self) -> str:
        """The report in lines."""
        rows = [f"{'token':>8} {'likeliest':>10} {'expected':>10}"]
        for token, ours, theirs in zip(PROMPT, self.likeliest, LIKELIEST, strict=True):
            rows.append(f"{token:>8} {ours:>10} {theirs:>10}{'' if ours == theirs else '  differs'}")
        rows.append(f"tail of the logits: at most {self.error:.4f} from the expected ones ({TOLERANCE} is allowed)")
        return "\n".join([*rows, "The folder is the released 8B." if self.good else "The folder differs."])


def verify_hf(source: str | Path) -> Verification:
    """Run the fixture of `transformers`' own test on a folder, FOLDER or hf:FOLDER in either layout, in bf16.

    The host holds the parameters in bf16 (17.7 GB) where there is no other device.

    Raises:
      InputError: the folder is not of the released 8B's architecture, or see `open_folder`; nothing is allocated then.
    """
    weights = open_folder_weights(source)
    check_released(weights.config, weights.source)
    return compare(weights.load_model(jnp.bfloat16))


def check_released(config: ModelConfig, where: str) -> None:
    """Refuse another architecture than the 8B's, the only one there is a fixture of; `where` names the folder."""
    there = replace(config, layer_pattern=config.period)
    for key, value in asdict(RELEASED_8B).items():
        if key not in _OF_NO_MATTER and getattr(there, key) != value:
            raise InputError(f"{where} is not ZAYA1-8B, of which alone there is a fixture: {key} is "
                             f"{getattr(there, key)!r}, and {value!r} in the 8B.")  # fmt: skip


def compare(model: Zaya) -> Verification:
    """What `model` says after each token of the prompt, beside what is expected."""
    out = np.asarray(jax.jit(logits)(model, jnp.asarray([PROMPT], jnp.int32))[0])
    likeliest = tuple(map(int, out.argmax(-1)))
    tail = out[-3:, -3:]
    error = float(np.abs(tail - np.asarray(TAIL)).max())
    rows = tuple(tuple(map(float, row)) for row in tail)
    return Verification(likeliest, rows, error, likeliest == LIKELIEST and error <= TOLERANCE)
