"""Kernels of other packages are candidates like the project's own, or refused with the package's name."""

import jax.numpy as jnp
import pytest

from tests.train_helpers import MODEL
from zaya_jax.errors import InputError
from zaya_jax.ops import registry
from zaya_jax.ops.target import Target

MODULE = """
import jax.numpy as jnp
from zaya_jax.ops.operation import Kernel
MINE = Kernel("mine", lambda architecture, x, *_: jnp.full(x.shape[:-2] + 2 * x.shape[-2:-1], 7.0), lambda *_: "", ())
PALLAS = Kernel("pallas", None, None, ())
"""


def install(monkeypatch, folder, entry):
    (folder / "their_kernels.py").write_text(MODULE)
    info = folder / "their_kernels-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-kernels\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[zaya_jax.kernels]\n{entry}\n")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(registry, "OPERATIONS", registry._with_installed(registry._OWN))


def test_an_installed_kernel_is_the_last_candidate_and_can_be_pinned(monkeypatch, tmp_path):
    install(monkeypatch, tmp_path, "gram_polynomial = their_kernels:MINE")
    target = Target("interpret", "any")
    assert registry.select_kernels(target, MODEL, "float32").chosen["gram_polynomial"] == "pallas"
    assert registry.OPERATIONS["gram_polynomial"].modules[1:] == ("their_kernels",)  # a table is stale if it changes
    pinned = registry.select_kernels(target, MODEL, "float32", pinned={"gram_polynomial": "mine"})
    assert pinned.chosen["gram_polynomial"] == "mine"
    found = pinned.implementation("gram_polynomial")(jnp.ones((4, 8)), *(jnp.ones(()),) * 3)
    assert (found == 7.0).all()
    with (
        pytest.warns(UserWarning, match="mine kernel for gram_polynomial"),
        pytest.raises(InputError, match=r"ops\.gram_polynomial=mine cannot be used: its error is"),
    ):
        registry.validate_kernels(pinned, MODEL, "float32")


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ("product = their_kernels:MINE", "There is no operation for the entry point product"),
        ("router = their_kernels:NONE", "Importing the entry point router .* of their-kernels raised AttributeError"),
        ("router = their_kernels:jnp", "There must be a Kernel with a new name"),
        ("gram_polynomial = their_kernels:PALLAS", "There must be a Kernel with a new name"),
    ],
)
def test_an_entry_point_that_is_no_new_kernel_of_an_operation_is_refused(monkeypatch, tmp_path, entry, problem):
    with pytest.raises(InputError, match=problem):
        install(monkeypatch, tmp_path, entry)
