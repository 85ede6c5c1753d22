"""The sample of text that shows what a run has learned, during training and at its end."""

from collections.abc import Mapping
from typing import Any

import jax

from zaya_jax.config import Config
from zaya_jax.config.checks import counted
from zaya_jax.data.tokenizer import Tokenizer
from zaya_jax.errors import InputError
from zaya_jax.generate.decode import generate_tokens
from zaya_jax.generate.sampling import Sampling
from zaya_jax.generate.text import encode_prompt
from zaya_jax.model.lora import merged
from zaya_jax.model.tree import Arrays, with_values
from zaya_jax.model.zaya import Zaya
from zaya_jax.parallel.mesh import replicated
from zaya_jax.train.memory import out_of_memory
from zaya_jax.train.program import PhaseProgram
from zaya_jax.train.state import TrainState


def replicated_model(program: PhaseProgram, state: TrainState, base: Arrays, dtypes: Mapping[str, Any]) -> Zaya:
    """Return the trained model on every device, with parameters in `dtypes`, by name; the others stay in fp32.

    Adapters are merged with `base` in the compute dtype, in which they were trained.
    """
    lora = program.config.lora
    params = state.params if lora is None else merged(base, state.params, lora.scale)
    params = {name: x.astype(dtypes.get(name, x.dtype)) for name, x in params.items()}
    params = jax.device_put(params, replicated(program.placement.mesh))
    return with_values(program.model, {**params, **state.balance})


def check_prompt(config: Config, tokenizer: Tokenizer) -> None:
    """Raise `InputError` if the prompt of samples leaves no room for a new token."""
    count, most = len(encode_prompt(tokenizer, config.sample.prompt)), config.model.max_positions
    if config.sample.tokens and count >= most:
        problem = f"sample.prompt has {counted(count, 'token')}, but must have fewer than model.max_positions={most}"
        raise InputError(f"{problem}. Shorten it, or set sample.tokens=0 sample.every=0.")


@out_of_memory("The sample", "Set sample.tokens and sample.every to 0: it needs all parameters on each device")
def draw_sample(
    config: Config, tokenizer: Tokenizer, program: PhaseProgram, state: TrainState, base: Arrays
) -> dict[str, str]:
    """Return the configured `prompt` and its `continuation`; all processes must call it, and the first call compiles.

    The same state gives the same text.
    """
    sample = config.sample
    prompt = encode_prompt(tokenizer, sample.prompt)
    room = config.model.max_positions - len(prompt)
    # With the kernels that all processes agreed on, and so in the dtypes of training, for which they were validated.
    model, sampling = replicated_model(program, state, base, program.placement.dtypes), Sampling(sample.temperature)
    options = {"stop_tokens": [tokenizer.eot], "placement": program.placement.replicated}
    (row,) = generate_tokens(model, [prompt], min(sample.tokens, room), sampling, seeds=[config.seed], **options)
    return {"prompt": sample.prompt, "continuation": tokenizer.decode_after(prompt, row.tokens)}
