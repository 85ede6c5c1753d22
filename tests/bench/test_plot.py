from zaya_jax.bench.plot import draw_lines


def test_lines_of_one_name_share_a_colour(tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    drawn = []
    plot = Axes.plot
    monkeypatch.setattr(
        Axes, "plot", lambda self, *a, **k: drawn.append((k["color"], k["label"])) or plot(self, *a, **k)
    )
    lines = {f"{name} seed {seed}": ([1, 2], [3, seed]) for seed in (0, 1) for name in ("muon", "adamw")}
    draw_lines(tmp_path / "a.png", lines, x="step", y="loss", marks={1: "here"})
    assert drawn == [("C0", "muon"), ("C1", "adamw"), ("C0", None), ("C1", None)]
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
