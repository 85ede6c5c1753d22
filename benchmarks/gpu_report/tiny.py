"""The run that parts of the report train on a CPU: it compiles in seconds."""

import sysconfig
from pathlib import Path
from typing import Any

# Of a process that uses one device, so that what it trains is the same on every machine.
ONE_DEVICE = {"JAX_CUDA_VISIBLE_DEVICES": "0", "JAX_ROCM_VISIBLE_DEVICES": "0"}
CONTEXT = 64  # tokens
# The keys of a configuration that say what is trained. Fewer kinds of parameters compile in half the time.
TINY: dict[str, Any] = {
    "model": {
        "vocab_size": 320, "hidden_size": 64, "num_layers": 2, "num_query_heads": 2, "num_kv_heads": 1, "head_dim": 32,
        "num_experts": 4, "expert_size": 64, "router_size": 16, "max_positions": CONTEXT, "rope_base": 1.0e4,
        "attention": "gqa", "router": "linear", "residual_scaling": False,
    },
    "optimizer": {"matrices": "adamw"},
}  # fmt: skip


def text_folder() -> str:
    """Return a folder with one package of the standard library, whose tokenizer takes a second."""
    return str(Path(sysconfig.get_path("stdlib"), "asyncio"))
