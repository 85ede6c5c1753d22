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


@pytest.mark.parametrize(("word", "kind"), [
    ("def attention_map", "image/png"), ("norm of each composed tap", "image/png"), ("nudged", "image/png"),
    ("expert of each token", "image/png"), ("probabilities of token", "image/png"),
    ("basic_interactive_setup", "text/html"),  # treescope's view of a layer
])  # fmt: skip
def test_figures_and_layers_are_shown(executed: nbformat.NotebookNode, word: str, kind: str):
    assert any(kind in output.get("data", {}) for output in outputs(executed, word))


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
