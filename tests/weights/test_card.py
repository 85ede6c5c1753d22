"""The card of an export says what the model is, what it was trained on, and how it scored."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from tests.trained_helpers import TrainedRun, trained_run
from zaya_jax.model.arithmetic import total_parameters
from zaya_jax.weights.card import model_card
from zaya_jax.weights.load import open_weights


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> TrainedRun:
    return trained_run(tmp_path_factory.getbasetemp())


@pytest.fixture
def run(trained, tmp_path) -> Path:
    """A copy of the run, whose records a test may change."""
    return Path(shutil.copytree(trained.folder, tmp_path / "run"))


def card(run: Path) -> str:
    return model_card(open_weights(run), Path("exports/mine"), "float32")


def test_an_export_has_a_card_with_the_training_the_data_and_the_scores(trained):
    text = (trained.export / "README.md").read_text()
    _, front, body = text.split("---\n", 2)
    assert yaml.safe_load(front) == {"library_name": "transformers", "tags": ["zaya", "mixture-of-experts"]}
    weights = open_weights(trained.folder)
    summary = json.loads((trained.folder / "summary.json").read_text())
    assert f"{total_parameters(weights.config) / 1e6:,.1f}M parameters" in body
    assert f"step {summary['steps']} of the run `{trained.folder.name}`" in body
    assert f"{weights.manifest.metadata['tokens_seen']:,} tokens" in body
    for source, account in summary["data"].items():
        used, documents = (account["train"][name] for name in ("used", "documents"))
        assert f"| {source} | {used} | {documents - used} |" in body
        assert (
            f"| summary.json | {source} | bits/byte | {summary['heldout_by_source'][source]['bits_per_byte']:.4f} |"
            in body
        )
    assert f'from_pretrained("{trained.export.name}")' in body


def test_scores_are_those_of_the_exported_step(run):
    step = open_weights(run).manifest.step
    (run / "evaluations").mkdir()
    task = {"tasks": {"arc|easy": {"metrics": {"acc,none": {"value": 0.25}}}}}
    text = {"texts": {"notes.txt": {"bits_per_byte": 1.5}}}
    for name, record in ((f"arc-{step}", task), (f"notes-{step}", text), (f"arc-{step + 1}", task)):
        (run / "evaluations" / f"{name}.json").write_text(json.dumps(record))
    rows = [line for line in card(run).splitlines() if ".json |" in line]
    assert rows[1:] == [
        rf"| arc-{step}.json | arc\|easy | acc,none | 0.2500 |",
        f"| notes-{step}.json | notes.txt | bits/byte | 1.5000 |",
    ]
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(summary | {"steps": step + 1}))
    assert "summary.json |" not in card(run)
    assert "no account of the data" in card(run)


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"heldout_by_source": 3}', '{"heldout_by_source": {"a": {"bits_per_byte": null}}}']
)
def test_a_record_that_cannot_be_read_is_named_and_does_not_end_an_export(run, content):
    (run / "summary.json").write_text(content)
    assert "| summary.json | – | cannot be read | – |" in card(run)


def test_an_account_that_cannot_be_read_does_not_end_an_export(run):
    (run / "summary.json").write_text('{"data": {"a": {}}}')
    assert "## Data\n\nThe records of the run folder cannot be read.\n" in card(run)


def test_a_checkpoint_without_records_says_so(run):
    (run / "summary.json").unlink()
    assert "None is recorded for this step." in card(run)


def test_names_cannot_write_into_the_card(run):
    """Tables, code and lines hold whatever a run is called."""
    named = run.rename(run.with_name("a`b\n# c"))
    assert "\n# c" not in card(named)
    assert r"of the run `ab\n# c`" in card(named)
