"""The report at the end of a run: held-out loss next to general-purpose compressors, and a sample of text."""

import json
from typing import Any

import jax

from zaya_jax.config import Config
from zaya_jax.config.checks import counted
from zaya_jax.config.stages import total_steps
from zaya_jax.data.loading.batches import heldout_text
from zaya_jax.errors import printable
from zaya_jax.job.multihost import is_primary
from zaya_jax.run.checkpoints import CHECKPOINTS, usable_checkpoints
from zaya_jax.run.files import write_atomically
from zaya_jax.run.folder import SUMMARY
from zaya_jax.run.metrics import finite
from zaya_jax.train.fit import TrainResult
from zaya_jax.train.sample import draw_sample


def report(config: Config, result: TrainResult) -> str:
    """Write `summary.json` into the run folder, unless that raises `Superseded`; return it as a few lines of text."""
    results = summary(config, result)
    path, lines = result.run_dir / SUMMARY, []
    if is_primary():
        lines += _early_end(config, result)
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
    total, samples = result.heldout, list[dict[str, str]]()
    if config.sample.tokens:
        if is_primary():
            print("Continuing the sample prompt", flush=True)
        samples += [draw_sample(config, result.prepared.tokenizer, result.program, result.state, result.base)]
    return {
        "steps": _steps(result),
        "heldout": {"nats_per_token": total.nats_per_token, "tokens": total.tokens},
        "heldout_by_source": by_source,
        "baselines": result.prepared.baselines,
        "data": result.data,
        "samples": samples,
    }


def _steps(result: TrainResult) -> int:
    return int(jax.device_get(result.state.step))


def _early_end(config: Config, result: TrainResult) -> list[str]:
    """Return lines that tell why a run ended before its last step; none if it did not."""
    step, best, folder = _steps(result), result.patience, result.run_dir / CHECKPOINTS
    if step >= total_steps(config):
        return []
    lowest = (
        f"the lowest was {best.lowest:.4f} nats/token at step {best.step}"
        if best.lowest is not None
        else "none was finite"
    )
    waited = counted(best.since, "evaluation")
    reason = f"the held-out loss has not fallen for {waited} (evaluation.patience), and {lowest}"
    kept = [each for each in usable_checkpoints(folder) if each.heldout_loss is not None and each.phase == best.phase]
    lines = [f"Stopped after step {step} of {total_steps(config)}: {reason}.", f"Last checkpoint: {folder / str(step)}"]
    for each in sorted(kept, key=lambda each: (each.heldout_loss, each.step))[:1]:
        lines.append(f"Best checkpoint kept: {folder / str(each.step)} ({each.heldout_loss:.4f} nats/token)")
    return [*map(printable, lines), "To train on, rerun the command with a larger evaluation.patience, or with 0."]
