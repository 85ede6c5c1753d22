"""Execute the notebooks: `python -m tests.notebook_helpers notebooks/cca.ipynb …` also writes their outputs."""

import os
import shutil
import sys
import tempfile
from pathlib import Path

import nbformat
import pytest
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent


def read_notebook(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def execute(path: Path) -> nbformat.NotebookNode:
    """The notebook after a run from a clean kernel, without times, in a copy of its folder."""
    notebook = read_notebook(path)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR"):
            patch.setenv(name, folder)
        copy = shutil.copytree(path.parent, Path(folder) / path.parent.name)
        for name in ("benchmarks", "configs"):  # what notebooks read beside their folder
            (Path(folder) / name).symlink_to(ROOT / name)
        # Without MPLBACKEND, the kernel draws into the notebook; without XLA_FLAGS, `toy.py` sets its flags.
        kernel = {name: value for name, value in os.environ.items() if name not in {"MPLBACKEND", "XLA_FLAGS"}}
        kernel |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
        # Sockets in the folder: another test can take the port that was free when this kernel chose it.
        manager = AsyncKernelManager(kernel_name="python3", transport="ipc", ip=str(Path(folder) / "kernel"))
        NotebookClient(
            notebook, km=manager, timeout=900, record_timing=False, coalesce_streams=True,
            resources={"metadata": {"path": str(copy)}},
        ).execute(env=kernel)  # fmt: skip
    return notebook


def clean(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The notebook without what differs between machines and versions."""
    notebook.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
                         "language_info": {"name": "python"}}  # fmt: skip
    for cell in notebook.cells:
        cell.metadata = {}
    return notebook


if __name__ == "__main__":
    for name in sys.argv[1:]:
        file = Path(name).resolve()
        file.write_text(nbformat.writes(clean(execute(file))) + "\n")
