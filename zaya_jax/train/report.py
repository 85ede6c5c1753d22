"""The last words of a run: the held-out loss beside general compressors, and a sample."""

import jax

from zaya_jax.config import Config
from zaya_jax.data.tokenizer import EOT
from zaya_jax.generate.decode import generate
from zaya_jax.train.loop import TrainResult


def report(config: Config, result: TrainResult) -> str:
    """A few lines to print."""
    held, split = result.heldout, result.prepared.heldout
    rows = [("this model", held.bits_per_byte(split.text_bytes))]
    rows += [(name, bits) for name, bits in result.prepared.baselines.items()]
    width = max(len(name) for name, _ in rows)
    table = "\n".join(f"  {name:<{width}}  {bits:.3f} bits/byte" for name, bits in rows)
    return (
        f"Held-out loss over {split.text_bytes:,} bytes in {split.documents:,} files: "
        f"{held.nats_per_token:.4f} nats/token\n"
        f"{table}\n"
        f"Continuation of {config.sample.prompt!r}:\n{continuation(config, result)}\n"
        f"Run folder: {result.run_dir}"
    )


def continuation(config: Config, result: TrainResult) -> str:
    """The configured prompt and what the model writes after it."""
    tokenizer, sample = result.prepared.tokenizer, config.sample
    prompt = [EOT, *tokenizer.encode(sample.prompt)]
    key = jax.random.fold_in(result.state.rng, config.train.steps)
    room = config.model.max_positions - len(prompt)
    (tokens,) = generate(result.model, [prompt], min(sample.tokens, room), temperature=sample.temperature,
                         stop_token=EOT, key=key)  # fmt: skip
    return sample.prompt + tokenizer.decode(tokens)
