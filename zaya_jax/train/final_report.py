"""The report at the end of a run: held-out loss next to general-purpose compressors, and a sample of text."""

import json
from typing import Any

from zaya_jax.config import Config
from zaya_jax.config.checks import counted
from zaya_jax.config.stages import total_steps
from zaya_jax.data.loading.batches import heldout_text
from zaya_jax.errors import printable
from zaya_jax.generate.decode import generate_tokens
from zaya_jax.generate.sampling import Sampling
from zaya_jax.job.multihost import is_primary
from zaya_jax.run.files import write_atomically
from zaya_jax.run.folder import SUMMARY
from zaya_jax.run.metrics import finite
from zaya_jax.train.fit import TrainResult
from zaya_jax.train.memory import out_of_memory


def report(config: Config, result: TrainResult) -> str:
    """Write `summary.json` into the run folder, unless that raises `Superseded`; return it as a few lines of text."""
    results = summary(config, result)
    path, lines = result.run_dir / SUMMARY, []
    if is_primary():
        result.fence.check()
        try:
            write_atomically(path, json.dumps(finite(results), indent=1, allow_nan=False) + "\n")
        except OSError as error:  # as on a full disk; the run itself is saved
            lines.append(f"Warning: could not write {path}: {error.strerror}. Rerun the command to write it.")
    for name, held in results["heldout_by_source"].items():
        of_all = extent = ""
        if held["bytes"] != held["all_bytes"]:  # the model read a part, the compressors everything
            of_all, extent = f" of {held['all_bytes']:,}", f" (over all {held['all_bytes']:,} bytes)"
        rows = {"this model": f"{held['bits_per_byte']:.3f} bits/byte"}
        rows |= {name: f"{bits:.3f} bits/byte{extent}" for name, bits in results["baselines"].items()}
        width = max(map(len, rows))
        source = f" of {name}" if config.data.sources else ""
        text = f"{held['bytes']:,}{of_all} bytes in {counted(held['documents'], 'document')}{source}"
        lines.append(f"Held-out loss over {text}: {held['nats_per_token']:.4f} nats/token")
        lines += [f"  {row:<{width}}  {value}" for row, value in rows.items()]
    for sample in results["samples"]:
        lines += [f"Continuation of {sample['prompt']!r}:", sample["prompt"] + sample["continuation"]]
    return "\n".join([*lines, printable(f"Run folder: {result.run_dir}")])


def summary(config: Config, result: TrainResult) -> dict[str, Any]:
    """Summarize a finished run as a dict for JSON.

    `heldout` is the loss over all sources, `nats_per_token` over `tokens`; `heldout_by_source` has the same for each,
    with `bits_per_byte`, the `bytes` and `documents` that were evaluated, and those of all its held-out text, `all_…`.
    `baselines` are the bits per byte that compressors need for all of it, see `data.baselines`; `data` tells what of
    each source is used, see `data.loading.account.account`; `samples` have a `prompt` and its `continuation`.
    """
    by_source, batches = {}, config.evaluation.batches
    for name, loss in result.heldout_by_source.items():
        if (text := heldout_text(config, result.prepared, name, batches)) is not None:
            losses = {"nats_per_token": loss.nats_per_token, "bits_per_byte": loss.bits_per_byte(text.text_bytes)}
            read = {"tokens": loss.tokens, "bytes": text.text_bytes, "documents": text.use.used}
            by_source[name] = losses | read | {"all_bytes": text.all_bytes, "all_documents": text.use.documents}
    total, sample = result.heldout, config.sample
    return {
        "steps": total_steps(config),
        "heldout": {"nats_per_token": total.nats_per_token, "tokens": total.tokens},
        "heldout_by_source": by_source,
        "baselines": result.prepared.baselines,
        "data": result.data,
        "samples": [{"prompt": sample.prompt, "continuation": continuation(config, result)}] if sample.tokens else [],
    }


@out_of_memory("The continuation", "Set sample.tokens to 0: it needs all parameters on each device")
def continuation(config: Config, result: TrainResult) -> str:
    """Generate the continuation of the configured prompt, which may take a compilation."""
    if is_primary():
        print("Continuing the sample prompt", flush=True)
    tokenizer, sample = result.prepared.tokenizer, config.sample
    prompt = [*tokenizer.prefix, *tokenizer.encode(sample.prompt)] or [tokenizer.eot]
    room = config.model.max_positions - len(prompt)
    # With the kernels that all processes agreed on, and so in the dtypes of training, for which they were validated.
    model, sampling = result.replicated(result.program.placement.dtypes), Sampling(sample.temperature)
    options = {"stop_tokens": [tokenizer.eot], "placement": result.program.placement.replicated}
    (row,) = generate_tokens(model, [prompt], min(sample.tokens, room), sampling, seeds=[config.seed], **options)
    return tokenizer.decode_after(prompt, row.tokens)
