"""What a person sees of a run: its picture, and the report at its end."""

import dataclasses
import json
import math

import matplotlib.image
import pytest

from tests.train_helpers import change, differing, make_program
from zaya_jax.config.checks import counted
from zaya_jax.data.loading.batches import heldout_text
from zaya_jax.generate.decode import Continuation
from zaya_jax.generate.sampling import Sampling
from zaya_jax.model.tree import parameters
from zaya_jax.train.final_report import report
from zaya_jax.train.run_plot import plot_run
from zaya_jax.train.sample import draw_sample


@pytest.fixture(autouse=True)
def asked(monkeypatch):
    """What is asked of `generate_tokens`, whose tests are elsewhere; it answers with two tokens."""
    asked = []
    monkeypatch.setattr("zaya_jax.train.sample.generate_tokens", lambda *arguments, **options: (
        asked.append((arguments, options)), [Continuation([65, 66], [], stopped=False)])[1])  # fmt: skip
    return asked


def continuation(config, result):
    return draw_sample(config, result.prepared.tokenizer, result.program, result.state, result.base)["continuation"]


def test_a_report_sets_the_model_beside_the_compressors_and_lets_it_speak(finished):
    config, result = finished
    text = heldout_text(config, result.prepared, "corpus", config.evaluation.batches)
    assert text is not None
    lines = report(config, result).splitlines()
    assert lines[0] == (
        f"Held-out loss over {text.text_bytes:,} of {text.all_bytes:,} bytes in {counted(text.use.used, 'document')}: "
        f"{result.heldout.nats_per_token:.4f} nats/token"
    )
    assert lines[1].split() == ["this", "model", f"{result.heldout.bits_per_byte(text.text_bytes):.3f}", "bits/byte"]
    for line, (name, value) in zip(lines[2:6], result.prepared.baselines.items(), strict=True):
        assert " ".join(line.split()) == f"{name} {value:.3f} bits/byte (over all {text.all_bytes:,} bytes)"
    assert lines[6] == "Continuation of 'the model':"
    assert lines[-1] == f"Run folder: {result.run_dir}"
    kept = json.loads((result.run_dir / "summary.json").read_text())
    assert kept["heldout"] == {"nats_per_token": result.heldout.nats_per_token, "tokens": result.heldout.tokens}
    assert kept["heldout_by_source"]["corpus"]["bytes"] == text.text_bytes
    assert kept["baselines"] == result.prepared.baselines
    (sample,) = kept["samples"]
    assert lines[7:-1] == (sample["prompt"] + sample["continuation"]).splitlines()
    silent = report(change(config, {"sample.tokens": 0}), result).splitlines()
    (result.run_dir / "summary.json").unlink()  # it is the run of other tests
    assert silent == [*lines[:6], lines[-1]]


def test_a_report_survives_a_disk_that_cannot_be_written(finished, tmp_path):
    config, result = finished
    (tmp_path / "file").write_text("")  # in the place of the run folder
    unwritable = dataclasses.replace(result, run_dir=tmp_path / "file")
    assert "summary.json: Not a directory" in report(change(config, {"sample.tokens": 0}), unwritable)


def test_a_continuation_is_drawn_from_the_result_with_the_seed_and_ends_where_positions_do(finished, asked):
    config, result = finished
    tokenizer, sample = result.prepared.tokenizer, config.sample
    prompt = [*tokenizer.prefix, *tokenizer.encode(sample.prompt)]
    assert continuation(config, result) == tokenizer.decode([65, 66])
    ((model, *rest), options) = asked.pop()
    assert not differing(parameters(model), parameters(result.model))
    assert rest == [[prompt], sample.tokens, Sampling(sample.temperature)]
    assert options == {"seeds": [config.seed], "stop_tokens": [tokenizer.eot],
                       "placement": result.program.placement.replicated}  # fmt: skip
    continuation(change(config, {"seed": config.seed + 1, "sample.tokens": 1000}), result)
    (_, _, steps, _), options = asked.pop()
    assert (steps, options["seeds"]) == (config.model.max_positions - len(prompt), [config.seed + 1])


def test_a_continuation_is_drawn_by_the_kernels_of_the_run_in_its_compute_dtype(finished, asked, monkeypatch):
    """Others would be tried by each process alone, and two that differ would wait for each other for ever."""
    config, result = finished
    program = make_program(change(config, {"train.compute_dtype": "bfloat16"}))
    monkeypatch.setattr("zaya_jax.generate.placement.validate_kernels", None)
    continuation(config, dataclasses.replace(result, program=program))
    ((model, *_), options) = asked.pop()
    assert {name: x.dtype for name, x in parameters(model).items()} == program.placement.dtypes
    assert options["placement"].kernels is program.placement.kernels
    assert options["placement"].mesh.size == 1
    assert {x.dtype.name for x in parameters(result.model).values()} == {"float32"}


def rows(count, layers=2):
    return [{"step": step, "loss": 5 / step, "load_entropy": [0.9] * layers} for step in range(1, count + 1)]


def test_a_run_becomes_a_picture_that_stays_where_a_new_one_fails(tmp_path, monkeypatch):
    path = tmp_path / "loss.png"
    plot_run(rows(30), path)
    image = matplotlib.image.imread(path)
    assert image.shape[:2] == (660, 825)
    assert image[..., :3].min() < 0.5  # something is drawn
    assert [file.name for file in tmp_path.iterdir()] == ["loss.png"]
    before = path.read_bytes()
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        plot_run(rows(9), path)
    assert path.read_bytes() == before


@pytest.fixture
def panels(monkeypatch, tmp_path):
    """Plots rows without drawing them; gives the panels of the loss and of the entropy."""
    figures = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, *_, **__: figures.append(figure))
    (tmp_path / "run").mkdir()

    def draw(*arguments):
        plot_run(arguments[0], tmp_path / "run" / "loss.png", *arguments[1:])
        return figures[-1].axes

    return draw


def legend(panel):
    """What the legend names."""
    shown = panel.get_legend()
    return [text.get_text() for text in shown.get_texts()] if shown else []


def lines(panel, label):
    """The points of the line that has this label."""
    (line,) = (line for line in panel.get_lines() if line.get_label() == label)
    return [list(map(float, values)) for values in line.get_data()]


@pytest.mark.parametrize(("count", "layers", "named"), [
    (1, 1, [0]), (30, 2, [0, 1]), (1, 8, range(8)), (30, 40, [0, 39]),
])  # fmt: skip
def test_a_picture_has_the_loss_and_each_layer_and_names_few_of_many(panels, count, layers, named):
    loss, entropy = panels(rows(count, layers))
    steps = [row["step"] for row in rows(count)]
    raw, smooth = loss.get_lines()
    assert [list(x) for x in raw.get_data()] == [steps, [5 / step for step in steps]]
    assert legend(loss) == ["training"]
    assert smooth.get_label() == "training"
    assert raw.get_alpha() < 1
    assert [list(line.get_data()[1]) for line in entropy.get_lines()] == [[0.9] * count] * layers
    assert len({str(line.get_color()) for line in entropy.get_lines()}) == layers
    assert legend(entropy) == [f"layer {layer}" for layer in named]
    assert loss.figure.get_suptitle() == "run: loss and expert load"


def test_a_picture_without_a_row_is_empty(panels):
    loss, entropy = panels([])
    assert [line.get_xdata().size for line in loss.get_lines()] == [0, 0]
    assert not entropy.get_lines()


def test_the_picture_shows_phases_and_what_compressors_need(panels):
    phases = [{**row, "phase": "one" if row["step"] < 5 else "two"} for row in rows(10)]
    for panel in (panels_ := panels(phases)):
        assert list(panel.get_lines()[-1].get_xdata()) == [4.5, 4.5]
    assert [text.get_text().strip() for text in panels_[0].texts] == ["two"]
    loss, _ = panels(rows(10), {"gzip": 3.0, "xz": 2.0, "xz_given_train": 1.0})
    assert legend(loss) == ["training", "gzip", "xz"]
    assert [set(lines(loss, name)[1]) for name in ("gzip", "xz")] == [{3.0}, {2.0}]


def test_the_picture_shows_the_losses_with_gaps(panels):
    def shown(**changes):
        loss, entropy = panels([*rows(10), {**rows(11)[-1], **changes}])
        return loss, loss.get_lines()[0].get_ydata()[-1], [line.get_ydata()[-1] for line in entropy.get_lines()]

    assert shown(loss=1.0)[1:] == (1.0, [0.9, 0.9])
    assert math.isnan(shown(loss=None)[1])
    gap, there = shown(load_entropy=[None, 0.5])[2]
    assert math.isnan(gap)
    assert there == 0.5
    assert lines(shown(heldout_loss=3.0)[0], "held-out") == [[11], [3]]
    assert legend(shown(heldout_loss=None)[0]) == ["training"]  # as none that is finite
