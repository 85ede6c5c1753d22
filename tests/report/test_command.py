"""The command: where it writes, and what it says of input that it cannot use."""

import json
import subprocess
import sys

import pytest

from tests.aegis.metrics_helpers import write_rows
from tests.config_helpers import SMALL
from tests.train_helpers import ROOT
from zaya_jax.config import to_yaml
from zaya_jax.report.__main__ import main


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(to_yaml(SMALL))
    write_rows(folder, 20)
    return folder


def refused(arguments, capsys) -> str:
    assert main(list(map(str, arguments))) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("Error: ")
    assert err.count("\n") == 1
    return err


def test_the_page_lies_in_the_run_and_is_replaced_by_the_next(run, capsys):
    for _ in range(2):
        assert main([str(run)]) == 0
        assert capsys.readouterr().out.startswith(f"Wrote {run / 'report.html'} (4.")
    assert [path.name for path in run.iterdir() if "report" in path.name] == ["report.html"]


def test_input_that_cannot_be_used_is_named_and_nothing_is_written(run, tmp_path, capsys):
    files = sorted(tmp_path.rglob("*"))
    assert f"{tmp_path / 'none'} does not exist." in refused([tmp_path / "none"], capsys)
    assert "is not a run folder: it contains neither config.yaml" in refused([run / "metrics.jsonl"], capsys)
    assert "--output is missing: with several runs" in refused([run, run], capsys)
    assert "A run is named twice." in refused([run, run, "--output", tmp_path / "a.html"], capsys)
    assert "9 runs are named, but one page shows at most 8." in refused([run] * 9, capsys)
    assert "but must end in .html." in refused([run, "--output", tmp_path / "page.txt"], capsys)
    assert "must be a file in an existing folder" in refused([run, "--output", tmp_path / "no" / "a.html"], capsys)
    assert "no_such.yaml" in refused([run, "--config", "no_such.yaml"], capsys)
    assert sorted(tmp_path.rglob("*")) == files


def test_what_is_no_report_is_not_replaced(run, tmp_path, capsys):
    other = tmp_path / "other.html"
    other.write_text("<html>")
    assert "exists and is not a run report. Name another file with --output." in refused(
        [run, "--output", other], capsys
    )
    assert other.read_text() == "<html>"
    (tmp_path / "folder.html").mkdir()
    assert "exists and is not a file." in refused([run, "--output", tmp_path / "folder.html"], capsys)


def test_a_folder_that_cannot_be_written_is_named(run, monkeypatch, capsys):
    from zaya_jax.report import __main__ as command

    def fail(path, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(command, "write_atomically", fail)
    assert "report.html cannot be written: No space left on device. Name another" in refused([run], capsys)


@pytest.mark.parametrize("content", [None, b"", b"{\n", b'{"step": 1'])
def test_a_run_without_steps_is_named(content, run, capsys):
    path = run / "metrics.jsonl"
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    assert "has no steps yet: metrics.jsonl is missing, empty or damaged." in refused([run], capsys)


def test_paths_that_no_folder_can_have_are_named(run, capsys):
    assert "run does not exist." in refused(["~nobody_of_this_name/run"], capsys)
    assert "must be a file in an existing" in refused([run, "--output", "~nobody_of_this_name/a.html"], capsys)
    assert "File name too long." in refused(["x" * 300], capsys)


def test_a_configuration_that_cannot_be_read_is_named(run, capsys):
    (run / "config.yaml").write_text("phases: 3")
    assert "config.yaml cannot be read, so the run in this folder cannot be identified." in refused([run], capsys)
    (run / "config.yaml").unlink()
    (run / "checkpoints").mkdir()
    assert "has no config.yaml" in refused([run], capsys)


def test_a_link_for_the_page_stays_a_link(run, tmp_path):
    (tmp_path / "link.html").symlink_to("page.html")
    assert main([str(run), "--output", str(tmp_path / "link.html")]) == 0
    assert (tmp_path / "link.html").is_symlink()
    assert "<title>" in (tmp_path / "page.html").read_text()


def test_runs_of_the_same_name_are_told_apart(run, tmp_path):
    other = tmp_path / "other" / "run"
    other.parent.mkdir()
    run.rename(other)
    third = tmp_path / "third" / "run"
    third.mkdir(parents=True)
    for path in other.iterdir():
        (third / path.name).write_bytes(path.read_bytes())
    page = tmp_path / "page.html"
    assert main([str(other), str(third), "--output", str(page)]) == 0
    assert "<title>Run report: other/run, third/run</title>" in page.read_text()


def test_it_imports_neither_jax_nor_numpy(run):
    code = ("import sys; from zaya_jax.report.__main__ import main; main(sys.argv[1:]); "
            "print(sorted({'jax', 'numpy'} & set(sys.modules)))")  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code, str(run)], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert json.loads((run / "metrics.jsonl").read_text().splitlines()[0])["step"] == 1
