"""The card of an exported model, `README.md`: what it is, what it was trained on, and how it scored."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from zaya_jax.config import ModelConfig
from zaya_jax.errors import InputError, printable
from zaya_jax.model.arithmetic import active_parameters, total_parameters
from zaya_jax.run.files import read_object
from zaya_jax.run.folder import SUMMARY
from zaya_jax.run.manifest import Manifest
from zaya_jax.run.versions import package_version
from zaya_jax.weights.load import AdaptedWeights
from zaya_jax.weights.sources import CheckpointWeights, Weights

_EVALUATIONS = "evaluations"  # where `evaluate` records scores in a run folder
# A damaged record, or one of another version, has other types.
_UNREADABLE = (AttributeError, LookupError, TypeError, ValueError)

Kind = Literal["hf", "legacy", "peft"]
_USE: dict[Kind, str] = {
    "hf": """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("FOLDER")
tokenizer = AutoTokenizer.from_pretrained("FOLDER")
```""",
    "legacy": "The folder has the layout of ZAYA1's first release, which current `transformers` does not load.",
    "peft": """```python
from peft import AutoPeftModelForCausalLM

model = AutoPeftModelForCausalLM.from_pretrained("FOLDER")  # loads the base model, too
```""",
}


def model_card(weights: Weights, folder: Path, dtype: str, kind: Kind = "hf", base: str | None = None) -> str:
    """Return the card of `weights`, exported to `folder` in `dtype`; a folder of the `kind` peft has a `base` model.

    Scores are those that the run folder has for this checkpoint, from the end of training and from `evaluate`. A file
    that cannot be read is named in the card.
    """
    checkpoint = weights.adapters if isinstance(weights, AdaptedWeights) else weights
    front = {"library_name": "peft" if kind == "peft" else "transformers", "tags": ["zaya", "mixture-of-experts"]}
    front |= {"base_model": base} if base else {}
    made = f"Exported in {dtype} by zaya_jax {package_version('zaya-jax') or 'without version'}"
    lines = ["---", *(f"{key}: {json.dumps(value)}" for key, value in front.items()), "---", ""]
    lines += [f"# {printable(folder.name)}", "", _architecture(weights.config), ""]
    if isinstance(checkpoint, CheckpointWeights):
        run, manifest = checkpoint.folder.parent.parent, checkpoint.manifest
        lines += [f"{made} from step {manifest.step:,} of the run {_code(run.name)}.", ""]
        records = dict(_records(run, manifest.step))
        parts = {"Training": (_training, manifest), "Data": (_data, records), "Scores": (_scores, records)}
        for title, (text, source) in parts.items():
            lines += [f"## {title}", "", *_readable(text, source), ""]
    else:
        lines += [f"{made} from the folder {_code(weights.folder.name)}.", ""]
    return "\n".join([*lines, "## Use", "", _USE[kind].replace("FOLDER", printable(folder.name)), ""])


def _readable(text: Callable[[Any], list[str]], source: Any) -> list[str]:
    """Return `text` of `source`, or that this cannot be read."""
    try:
        return text(source)
    except _UNREADABLE:
        return ["The records of the run folder cannot be read."]


def _code(text: str) -> str:
    return f"`{printable(text).replace('`', '')}`"


def _architecture(config: ModelConfig) -> str:
    total, active = (f"{count(config) / 1e6:,.1f}M" for count in (total_parameters, active_parameters))
    sizes = f"{config.num_layers} layers of width {config.hidden_size}, {config.num_experts} experts a layer"
    return f"A ZAYA1 model with {total} parameters, of which a token uses {active}: {sizes}."


def _records(run: Path, step: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what a run folder has recorded on a checkpoint, by file; {} for a file that cannot be read."""
    paths = [run / SUMMARY, *sorted((run / _EVALUATIONS).glob(f"*-{step}.json"))]
    for path in paths:
        if path.exists():
            try:
                record = read_object(path)
            except InputError:
                record = {}
            if path.name != SUMMARY or record.get("steps", step) == step:
                yield path.name, record


def _training(manifest: Manifest) -> list[str]:
    metadata = manifest.metadata
    config, tokens = metadata["config"], metadata.get("tokens_seen")
    if tokens is None:  # imported or averaged, without a training state
        return ["The checkpoint has no record of its training."]
    start = config.get("resume_from") or config.get("init_from")
    first = f"started from {_code(Path(start).name)}" if start else "started from random parameters"
    lines = [f"{tokens:,} tokens, padding included; {first}.", "", "| phase | tokens | mixture |", "|---|---|---|"]
    for phase in config.get("phases", []):
        mixture = ", ".join(f"{name} {weight:g}" for name, weight in (phase.get("mixture") or {}).items())
        lines.append(f"| {_cell(phase['name'])} | {phase['tokens']:,} | {_cell(mixture) or '–'} |")
        if phase["name"] == metadata.get("phase"):  # later ones have not begun
            break
    return lines


def _data(records: Mapping[str, Mapping[str, Any]]) -> list[str]:
    sources = records.get(SUMMARY, {}).get("data") or {}
    if not sources:
        return [f"The run folder has no account of the data for this step ({SUMMARY})."]
    lines = ["| source | documents trained on | training documents left out |", "|---|---|---|"]
    for name, source in sources.items():
        if not (train := source["train"])["used"]:
            continue
        lines.append(f"| {_cell(name)} | {train['used']:,} | {train['documents'] - train['used']:,} |")
    return lines


def _scores(records: Mapping[str, Mapping[str, Any]]) -> list[str]:
    lines = []
    for file, record in records.items():
        try:
            lines += [f"| {file} | {' | '.join(cells)} |" for cells in _cells(record, is_summary=file == SUMMARY)]
        except _UNREADABLE:
            lines.append(f"| {file} | – | cannot be read | – |")
    if not lines:
        return ["None is recorded for this step. `zaya evaluate RUN` before the export records them."]
    return ["| recorded in | data | score | value |", "|---|---|---|---|", *lines]


def _cells(record: Mapping[str, Any], *, is_summary: bool) -> Iterator[tuple[str, str, str]]:
    """Yield what was scored, the name of the score and its value."""
    if not record:
        raise ValueError
    texts = record.get("heldout_by_source", {}) if is_summary else record.get("heldout", {}) | record.get("texts", {})
    for name, text in texts.items():
        yield _cell(name), "bits/byte", f"{text['bits_per_byte']:.4f}"
    for name, task in record.get("tasks", {}).items():
        for metric, value in task["metrics"].items():
            yield _cell(name), _cell(metric), f"{value['value']:.4f}"


def _cell(text: str) -> str:
    return printable(text).replace("|", "\\|")
