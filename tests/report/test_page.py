"""Pages about real runs: every plot is there and shows something, in a browser that may load nothing."""

import json
import shutil
from pathlib import Path

import plotly.graph_objects
import pytest
import yaml

from tests.browser_helpers import Page, look
from tests.report.run_helpers import corpus_run, phased_run, supervised
from zaya_jax.aegis.report.page import MARK
from zaya_jax.report.__main__ import main
from zaya_jax.run.metrics import read_rows

COMPARED = [
    "Training and held-out loss",
    "Learning rate",
    "Batch",
    "Throughput",
    "Model FLOP/s",
    "Data wait",
    "Entropy of the expert load",
    "Largest expert load",
    "Tokens that skip the experts",
    "Balancing biases",
    "Gradient norm",
]
OF_ONE = ["Held-out bits per byte", "Expert load", "Entropy of the expert load by layer", "Gradient norm by role",
          "Update norm by role"]  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[Path]:
    """A run over text, and a supervised one of two phases; read only."""
    folder = tmp_path_factory.mktemp("runs")
    text = corpus_run(tmp_path_factory.getbasetemp(), folder)
    return [text, supervised(phased_run(text, folder))]


@pytest.fixture(scope="module")
def both(runs, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("page") / "both.html"
    assert main([*map(str, runs), "--output", str(path)]) == 0
    return path


def copied(run: Path, folder: Path) -> Path:
    return Path(shutil.copytree(run, folder / run.name))


def page(run: Path, folder: Path, *arguments: str) -> Page:
    """The page about a run, written in `folder`."""
    path = folder / "page.html"
    assert main([str(run), "--output", str(path), *arguments]) == 0
    return Page(path.read_text(encoding="utf-8"))


@pytest.mark.soak
@pytest.mark.parametrize("width", [420, 1200])
def test_a_browser_shows_every_plot_and_loads_nothing(width, both, tmp_path):
    seen = look(both, width, tmp_path)
    titles = [plot["title"] for plot in seen["plots"]]
    expected = [*COMPARED, *(f"{run}: {title}" for run in ("run", "phased") for title in OF_ONE),
                "phased: Loss by source", "phased: Where the time went"]  # fmt: skip
    assert sorted(titles) == sorted(expected)
    for plot in seen["plots"]:
        assert plot["marks"] > 0, plot["title"]
        assert plot["labels"] >= 1, plot["title"]
        assert plot["area"] > 40, plot["title"]
        assert abs(plot["drawn"] - plot["width"]) < 2, plot["title"]
        if "time" not in plot["title"]:
            assert all(tick.replace(",", "").isdecimal() for tick in plot["xticks"]), plot
            assert len(set(plot["xticks"])) == len(plot["xticks"]) > 1
    sliders = [plot["positions"] for plot in seen["plots"] if "positions" in plot]
    assert [len(maps) for maps in sliders] == [12, 9]
    assert all(maps[0] != maps[-1] for maps in sliders)
    (step, name), (tokens, of_tokens), (hours, of_hours), back = seen["units"]
    assert [step, name, of_tokens, of_hours] == [12, "step", "tokens seen, with padding", "time in steps (h)"]
    assert (tokens, back) == (12 * 128, [12, "step"])
    assert 0 < hours < 1
    assert seen["refused"] == seen["loaded"] == []
    assert seen["width"] <= seen["window"]
    assert min(seen["letters"] + [size for plot in seen["plots"] for size in plot["letters"]]) >= 8 * 96 / 72  # 8 pt


def figures(path: Path) -> list[dict]:
    text = path.read_text(encoding="utf-8")
    return json.loads(text.partition('id="figures">')[2].partition("</script>")[0])["figures"]


def test_plots_are_valid_and_show_the_rows(both, runs):
    made = figures(both)
    for figure in made:
        plotly.graph_objects.Figure(figure)  # refuses what plotly does not know
    rows = [read_rows(run / "metrics.jsonl") for run in runs]
    (loss,) = [figure for figure in made if figure["layout"]["yaxis"]["title"]["text"] == "loss (nats/token)"][:1]
    by_name = {trace["name"]: trace for trace in loss["data"]}
    for run, each in zip(("run", "phased"), rows, strict=True):
        training, held = by_name[f"training, {run}"], by_name[f"held-out, {run}"]
        assert training["x"] == [row["step"] for row in each]
        assert training["y"] == pytest.approx([row["loss"] for row in each], rel=1e-4)
        assert held["x"] == [row["step"] for row in each if "heldout_loss" in row]
        assert held["line"]["color"] == training["line"]["color"]
    assert by_name["training, run"]["line"]["color"] != by_name["training, phased"]["line"]["color"]
    assert {"gzip", "xz", "skipped step, phased", "fault, phased"} < by_name.keys()
    skipped = [row["step"] for row in rows[1] if "skip" in row]
    assert by_name["skipped step, phased"]["x"] == skipped != []
    assert [shape["x0"] for shape in loss["layout"]["shapes"]] == [10]


def test_the_first_table_says_how_the_runs_went(both, runs):
    seen, last = Page(both.read_text()), [read_rows(run / "metrics.jsonl")[-1] for run in runs]
    assert seen.cells("held-out loss (nats/token)")[0].startswith(f"{last[0]['heldout_loss']:.4f} after step 12")
    assert seen.cells("steps") == ["12 of 12", "18 of 18"]
    assert seen.cells("tokens, with padding") == [f"{row['tokens_seen']:,}" for row in last]
    assert [cell.partition(",")[0] for cell in seen.cells("state")] == ["finished", "finished"]
    assert [cell[0] == "0" for cell in seen.cells("skipped steps")] == [True, False]
    assert seen.cells("goodput")[0] == "not supervised"
    assert "on 2 nodes" in seen.cells("goodput")[1]
    assert seen.cells("faults")[1].startswith("2, in ")
    summary = json.loads((runs[0] / "summary.json").read_text())
    assert (
        seen.cells("held-out loss (bits/byte)")[0] == f"{summary['heldout_by_source']['corpus']['bits_per_byte']:.4f}"
    )


def test_settings_that_differ_are_listed(both, runs):
    rows = Page(both.read_text()).rows
    assert ["train.log_every", "1", "2"] in rows
    assert ["phases.wide.tokens", "–", "1280"] in rows
    assert not [row for row in rows if row[0] == "model.hidden_size"]


def test_a_run_is_compared_with_where_it_came_from_and_with_a_file(runs, tmp_path):
    run = copied(runs[0], tmp_path)
    config = run / "config.yaml"
    text = config.read_text().replace("log_every: 1\n", "log_every: 3\n")
    assert text != config.read_text()
    config.write_text(text + f"init_from: {runs[0]}/checkpoints/12\n" if "init_from: null" not in text else
                      text.replace("init_from: null", f"init_from: {runs[0]}/checkpoints/12"))  # fmt: skip
    reference = tmp_path / "reference.yaml"
    reference.write_text((runs[0] / "config.yaml").read_text().replace("log_every: 1\n", "log_every: 4\n"))
    seen = page(run, tmp_path, "--config", str(reference))
    assert ["train.log_every", "1", "3"] in seen.rows
    assert ["train.log_every", "4", "3"] in seen.rows
    assert f"Differences from {reference}" in seen.headings


def test_a_run_of_an_earlier_version_lacks_plots_and_says_so(runs, tmp_path):
    run = copied(runs[0], tmp_path)
    rows = read_rows(run / "metrics.jsonl")
    for row in rows:
        for key in ("expert_counts", "load_entropy", "grad_norm_by_role", "learning_rate"):
            row.pop(key, None)
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in ("timings.jsonl", "summary.json", "status.json"):
        (run / name).unlink()
    shown = [
        attributes["aria-label"] for tag, attributes in page(run, tmp_path).tags if attributes.get("class") == "plot"
    ]
    gone = {"Learning rate", "Entropy of the expert load", "Throughput", "Model FLOP/s", "Data wait"}
    assert set(shown) == {*COMPARED, "Update norm by role"} - gone
    text = (tmp_path / "page.html").read_text()
    for said in ("Learning rate is not shown: metrics.jsonl does not record it.", "Throughput is not shown",
                 "The load of the experts is not shown: metrics.jsonl does not record expert_counts.",
                 "Goodput is not shown: run was not run under",
                 "Held-out bits per byte are not shown: the run has not"):  # fmt: skip
        assert said in text


def test_a_run_that_still_trains_is_reported(runs, tmp_path):
    run = copied(runs[0], tmp_path)
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (run / "metrics.jsonl").write_bytes(b"".join(lines[:5]) + lines[5][:40])
    status = json.loads((run / "status.json").read_text())
    status |= {"state": "running", "exit_status": None, "host": "another"}
    (run / "status.json").write_text(json.dumps(status))
    seen = page(run, tmp_path)
    assert seen.cells("steps") == ["5 of 12"]
    assert seen.cells("state")[0].startswith("running since ")
    assert "damaged" not in (tmp_path / "page.html").read_text().partition('id="figures"')[0]


@pytest.mark.parametrize(("name", "content", "said"), [
    ("metrics.jsonl", "cut", "Line 4 of {run}/metrics.jsonl is damaged; the rows from there on are not shown."),
    ("summary.json", "{", "summary.json is not JSON"),
    ("changes.jsonl", '{"step": 1}\n', "changes.jsonl cannot be read"),
    ("evaluations/heldout-12.json", "[]", "heldout-12.json is damaged; its evaluation is not shown."),
    ("summary.json", '{"samples": [{"prompt": 1}]}', "A part of this section "
     "could not be made; a file of the run may be damaged. KeyError: 'continuation'."),
    ("evaluations/a.json", '{"heldout": {"a": {"nats_per_token": [], "perplexity": "x"}}}',
     "A part of this section could not be made"),
    ("evaluations/a.jsonl/file", "", "a.jsonl cannot be read: it is a folder, a pipe or a device"),
    ("aegis/n/events.jsonl", "".join(
        f'{{"id": {n}, "attempt": 1, "v": 1, "unix": {n}, "time": "", "kind": "{kind}", "code": "", '
        '"severity": "info", "text": "", "first_step": 1}\n' for n, kind in enumerate(("start", "end"), 1)
    ), "events.jsonl: 2 lines left out, damaged or of another version."),
])  # fmt: skip
def test_damage_costs_what_is_damaged_alone_and_is_said(name, content, said, runs, tmp_path):
    run = copied(runs[0], tmp_path)
    path = run / name
    path.parent.mkdir(exist_ok=True, parents=True)
    if content == "cut":
        lines = path.read_bytes().splitlines(keepends=True)
        content = b"".join([*lines[:3], lines[3][: len(lines[3]) // 2] + b"\n", *lines[4:]]).decode()
    path.write_text(content)
    seen = page(run, tmp_path)
    text = (tmp_path / "page.html").read_text().partition('id="figures"')[0].replace("&#39;", "'").replace("&#34;", '"')
    assert said.format(run=run) in text
    assert "Training and held-out loss" in seen.headings


def test_what_the_preparation_left_out_is_named(runs, tmp_path):
    run = copied(runs[0], tmp_path)
    summary = json.loads((run / "summary.json").read_text())
    summary["data"]["corpus"] |= {"refused": {"invalid JSON": 7}, "unread_files": {f".k{n}": 20 - n for n in range(10)}}
    (run / "summary.json").write_text(json.dumps(summary))
    page(run, tmp_path)
    text = (tmp_path / "page.html").read_text()
    assert "corpus: documents that the preparation refused: 7 invalid JSON." in text
    assert "13 .k7, 23 of other kinds." in text
    del summary["data"]["corpus"]["unread_files"]  # as an earlier version wrote it
    (run / "summary.json").write_text(json.dumps(summary))
    page(run, tmp_path)
    assert "7 invalid JSON." in (tmp_path / "page.html").read_text()


def test_text_of_a_run_is_escaped(runs, tmp_path):
    evil = "</script><script>alert('&')</script>"
    run = copied(runs[0], tmp_path)
    summary = json.loads((run / "summary.json").read_text())
    summary["samples"] = [{"prompt": evil, "continuation": evil}]
    (run / "summary.json").write_text(json.dumps(summary))
    rows = read_rows(run / "metrics.jsonl")
    for row in rows:
        row["grad_norm_by_role"] = {evil: 1.0}
        row["phase"] = evil if row["step"] > 3 else "start"
        row |= {"skip": evil}
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    seen = page(run, tmp_path)
    assert [tag for tag, _ in seen.tags].count("script") == 3
    text = (tmp_path / "page.html").read_text()
    assert evil not in text
    assert text.startswith(MARK)


def test_names_are_no_markup_in_plots(runs, tmp_path):
    names = ['<a href="https://x">', "a<b>c", "&lt;%{x}"]
    escaped = ['&lt;a href="https://x">', "a&lt;b>c", "&amp;lt;&#37;{x}"]
    run = copied(runs[1], tmp_path)
    rows = read_rows(run / "metrics.jsonl")
    for row in rows:
        row["loss_by_source"] = row["grad_norm_by_role"] = dict.fromkeys(names, 1.0)
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run / "aegis" / "node-1").rename(run / "aegis" / names[1])
    page(run, tmp_path)
    texts = [text for figure in figures(tmp_path / "page.html") for trace in figure["data"]
             for text in (trace.get("name", ""), *(trace["y"] if trace["type"] == "bar" else ()))]  # fmt: skip
    assert not [text for text in texts if "<" in text]
    assert {*escaped, *(f"{name}, training" for name in escaped)} < set(texts)


@pytest.mark.parametrize("source", ["x" * 300, "~nobody_of_this_name/run"])
def test_a_parent_that_cannot_be_looked_for_is_no_error(source, runs, tmp_path):
    run = copied(runs[0], tmp_path)
    config = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump(config | {"init_from": source}))
    page(run, tmp_path)
    assert f"{source} has no config.yaml, so its settings are unknown." in (tmp_path / "page.html").read_text()


def test_a_cell_of_damage_is_empty_and_costs_no_other(runs, tmp_path):
    run = copied(runs[0], tmp_path)
    summary = json.loads((run / "summary.json").read_text())
    summary["heldout_by_source"]["corpus"]["tokens"] = 10**400  # no float
    (run / "summary.json").write_text(json.dumps(summary))
    seen = page(run, tmp_path)
    assert seen.cells("steps") == ["12 of 12"]
    assert not [row for row in seen.rows if row and row[0] == "held-out bits/byte"]  # all cells are –
