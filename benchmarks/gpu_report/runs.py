"""The runs that parts of the report train, in a folder and an environment that do not outlive their part."""

import contextlib
import os
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

from zaya_jax.config import Config, load_config
from zaya_jax.config.shipped import shipped
from zaya_jax.hardware.detection import select_preset
from zaya_jax.hardware.environment import apply_preset
from zaya_jax.lab.subprocesses import restored_environment

# Of a process that uses one device, so that what it trains is the same on every machine.
ONE_DEVICE = {"JAX_CUDA_VISIBLE_DEVICES": "0", "JAX_ROCM_VISIBLE_DEVICES": "0"}
CONTEXT = 64  # tokens of the small models
_SMALL = (
    "model.vocab_size=512 model.hidden_size=64 model.num_layers=2 model.head_dim=32 model.num_experts=4 "
    "model.expert_size=64 model.router_size=16 model.max_positions=64"
)
# Fewer kinds of parameters compile in half the time.
TINY = (
    f"{_SMALL} model.vocab_size=320 model.attention=gqa model.router=linear model.residual_scaling=false "
    "optimizer.matrices=adamw"
)
_LARGE = (
    "model.vocab_size=16384 model.hidden_size=512 model.num_layers=8 model.num_query_heads=8 model.num_kv_heads=2 "
    "model.head_dim=64 model.num_experts=16 model.expert_size=512 model.router_size=128 model.max_positions=1024"
)
MEDIUM = f"{_LARGE} model.vocab_size=2048 model.num_layers=4 model.max_positions=512"  # with the kernels' sizes
# One package of the standard library, whose tokenizer takes a second.
SMALL_TEXT = [f"data.corpus={sysconfig.get_path('stdlib')}/asyncio", "data.heldout_fraction=0.2"]
# Waits until the process that made the folder has ended, and then a moment for its children to end. It is no child of
# that process, so whoever kills it with all its children does not kill this.
_REMOVE = 'exec 3<&0; (cat <&3; sleep 1; rm -rf -- "$1") >/dev/null 2>&1 &'
LARGE_EVERY = 100  # steps between evaluations of the large run


def small_config() -> Config:
    """Make a run of 50 steps on one package of the standard library."""
    return make_config(_SMALL, CONTEXT, 4, 50, 25, "float32", SMALL_TEXT)


def large_config() -> Config:
    """Make a run of 116M parameters in bf16 that is longer than its part."""
    return make_config(_LARGE, 1024, 32, 20_000, LARGE_EVERY, "bfloat16", [])


def make_config(
    model: str, context: int, sequences: int, steps: int, every: int, dtype: str, changes: list[str]
) -> Config:
    """Change `configs/tiny.yaml` to a run with constant learning rates, which evaluates `every` so many steps."""
    batch = sequences * context
    overrides = (
        f"{model} data.context={context} train.batch.tokens={batch} phases.0.tokens={steps * batch} "
        f"phases.0.schedule.shape=constant phases.0.schedule.warmup_tokens={5 * batch} "
        f"train.compute_dtype={dtype} train.remat=dots optimizer.muon.newton_schulz_dtype=bfloat16 "
        f"evaluation.every={every} evaluation.batches=1 evaluation.batch_size={sequences} checkpoint.every={5 * every}"
    )
    return load_config(shipped("tiny.yaml"), [*overrides.split(), *changes])


@contextlib.contextmanager
def temporary_folder(part: str) -> Iterator[Path]:
    """Make a folder for tens of gigabytes, which is removed at the end of the block, and if this process is killed."""
    with tempfile.TemporaryDirectory(prefix=f"zaya-{part}-", ignore_cleanup_errors=True) as folder:
        command = ["sh", "-c", _REMOVE, "sh", folder]
        with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True):  # noqa: S603
            yield Path(folder)


@contextlib.contextmanager
def folder_of_runs(part: str) -> Iterator[Path]:
    """Make a `temporary_folder`, and an environment for runs on one device, like that of `zaya_jax.main`."""
    with temporary_folder(part) as folder, restored_environment():
        apply_preset(select_preset(None))
        os.environ |= {**ONE_DEVICE, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder / "compiled")
        yield folder
