"""The last words of a run: the held-out loss beside general compressors, and a sample."""

import jax

from zaya_jax.config import Config
from zaya_jax.config.stages import total_steps
from zaya_jax.data.pipeline import heldout_bytes
from zaya_jax.generate.decode import generate
from zaya_jax.train.loop import TrainResult


def report(config: Config, result: TrainResult) -> str:
    """A few lines to print."""
    lines = []
    for name, held in result.heldout_of.items():
        documents, text_bytes = heldout_bytes(config, result.prepared, name)
        rows = [("this model", held.bits_per_byte(text_bytes)), *result.prepared.baselines.items()]
        width = max(len(row) for row, _ in rows)
        of = f" of {name}" if config.data.sources else ""
        lines += [
            f"Held-out loss over {text_bytes:,} bytes in {documents:,} documents{of}: "
            f"{held.nats_per_token:.4f} nats/token",
            *(f"  {row:<{width}}  {bits:.3f} bits/byte" for row, bits in rows),
        ]
    if config.sample.tokens:
        lines += [f"Continuation of {config.sample.prompt!r}:", continuation(config, result)]
    return "\n".join([*lines, f"Run folder: {result.run_dir}"])


def continuation(config: Config, result: TrainResult) -> str:
    """The configured prompt and what the model writes after it."""
    tokenizer, sample = result.prepared.tokenizer, config.sample
    prompt = [*tokenizer.prefix, *tokenizer.encode(sample.prompt)] or [tokenizer.eot]
    key = jax.random.fold_in(result.state.rng, total_steps(config))
    room = config.model.max_positions - len(prompt)
    (tokens,) = generate(result.model, [prompt], min(sample.tokens, room), temperature=sample.temperature,
                         stop_token=tokenizer.eot, key=key)  # fmt: skip
    return sample.prompt + tokenizer.decode(tokens)
