"""notebooks/model_tour.ipynb runs, from a clean kernel, and shows what it says it shows."""

import os
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "model_tour.ipynb"


def read() -> nbformat.NotebookNode:
    return nbformat.read(NOTEBOOK, as_version=4)


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> nbformat.NotebookNode:
    """The notebook after a run whose kernel writes its files (history, connection) to a temporary folder."""
    folder = str(tmp_path_factory.mktemp("jupyter"))
    notebook = read()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR"):
            patch.setenv(name, folder)
        client = NotebookClient(
            notebook, kernel_name="python3", timeout=300, resources={"metadata": {"path": str(NOTEBOOK.parent)}}
        )
        # Without a backend of its own choice, the kernel draws figures into the notebook.
        client.execute(env={name: value for name, value in os.environ.items() if name != "MPLBACKEND"})
    return notebook


def outputs(notebook: nbformat.NotebookNode, word: str) -> list[nbformat.NotebookNode]:
    """The outputs of the one code cell whose source holds `word`."""
    (cell,) = [cell for cell in notebook.cells if cell.cell_type == "code" and word in cell.source]
    return cell.outputs


def text(notebook: nbformat.NotebookNode, word: str) -> str:
    return "".join(output.text for output in outputs(notebook, word) if output.output_type == "stream")


def shown(cell: nbformat.NotebookNode) -> tuple[set[str], str]:
    """The kinds of output of a code cell, and what it printed; differences of a rounding error's size are masked."""
    kinds = {kind for output in cell.outputs for kind in output.get("data", {"stream": None})}
    printed = "".join(output.text for output in cell.outputs if output.output_type == "stream")
    return kinds, re.sub(r"\d\.\de-\d+", "tiny", printed)


def test_the_committed_outputs_are_those_of_a_run(executed: nbformat.NotebookNode):
    cells = [[cell for cell in one.cells if cell.cell_type == "code"] for one in (read(), executed)]
    for committed, run in zip(*cells, strict=True):
        assert shown(committed) == shown(run), run.source


def test_nothing_fails_and_nothing_warns(executed: nbformat.NotebookNode):
    for cell in executed.cells:
        for output in cell.get("outputs", []):
            assert output.output_type != "error", output
            assert output.get("name") != "stderr", output.text


@pytest.mark.parametrize(
    "word",
    ["def attention_map", "norm of each composed tap", "nudged", "expert of each token", "probabilities of token"],
)
def test_the_figures_are_drawn(executed: nbformat.NotebookNode, word: str):
    assert any("image/png" in output.get("data", {}) for output in outputs(executed, word))


def test_treescope_shows_a_layer(executed: nbformat.NotebookNode):
    assert any("text/html" in output.get("data", {}) for output in outputs(executed, "basic_interactive_setup"))


def test_it_says_the_size_of_the_released_model(executed: nbformat.NotebookNode):
    assert "8,840,488,784" in text(executed, "total_parameters")


def test_an_impulse_moves_three_keys_and_two_values_and_stops_at_the_boundary(executed: nbformat.NotebookNode):
    assert text(executed, "nudged").splitlines() == [
        "token 33: k moves at [33, 34, 35]",
        "token 33: v moves at [33, 34]",
        "token 40: k moves at [40]",
        "token 40: v moves at [40]",
    ]


def test_documents_stay_apart(executed: nbformat.NotebookNode):
    said = text(executed, "changed_bs").splitlines()
    assert said == ["first document changed:  True", "second document changed: False"]
