import matplotlib.image
import pytest

from zaya_jax.train.plot import plot_run


def rows(count, layers=2):
    return [{"step": step, "loss": 5 / step, "load_entropy": [0.9] * layers} for step in range(1, count + 1)]


@pytest.mark.parametrize("layers", [1, 8, 40])
@pytest.mark.parametrize("count", [0, 1, 30])
def test_a_run_becomes_a_picture(tmp_path, count, layers):
    path = tmp_path / "loss.png"
    found = rows(count, layers)
    if count:
        found[-1]["heldout_loss"] = 3.0
    plot_run(found, path)
    image = matplotlib.image.imread(path)
    assert image.shape[:2] == (660, 770)
    assert image[..., :3].min() < 0.5  # something is drawn
    assert [file.name for file in tmp_path.iterdir()] == ["loss.png"]


def test_the_picture_shows_the_losses(tmp_path):
    pictures = []
    for change in ({}, {"loss": 1.0}, {"heldout_loss": 3.0}, {"load_entropy": [0.1, 0.2]}):
        plot_run([*rows(10), {**rows(11)[-1], **change}], tmp_path / "loss.png")
        pictures.append((tmp_path / "loss.png").read_bytes())
    assert len(set(pictures)) == len(pictures)


def test_losses_that_are_not_finite_leave_a_gap(tmp_path):
    found = rows(10)
    found[3]["loss"] = None
    found[4]["load_entropy"] = [None, 0.5]
    found[5]["heldout_loss"] = None
    plot_run(found, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_plot_that_fails_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "loss.png"
    plot_run(rows(3), path)
    before = path.read_bytes()
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        plot_run(rows(9), path)
    assert path.read_bytes() == before
