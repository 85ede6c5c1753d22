"""No hidden wait for the device: `transfer_guard` does not see `float(array)` and `np.asarray(array)` on the CPU."""

import ast
from pathlib import Path

import pytest

import zaya_jax.train.fit

FOLDER = Path(zaya_jax.train.fit.__file__).parent
# They see numbers that `jax.device_get` has read, or text.
OUTSIDE = {"sinks/console.py", "memory.py", "final_report.py", "run_plot.py"}
HIDDEN = {"float", "bool", "np.asarray", "np.array", "numpy.asarray", "numpy.array"}


def waits(source):
    """Calls that would wait for an array; of one that `jax.device_get` has fetched they are fine."""
    return [
        f"line {node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and (ast.unparse(node.func) in HIDDEN or (isinstance(node.func, ast.Attribute) and node.func.attr == "item"))
        and "device_get" not in ast.unparse(node)
    ]


def test_the_search_finds_what_it_looks_for():
    for text in ("float(loss)", "np.asarray(x)", "row = {'a': numpy.array(metrics['loss'])}", "loss.item()"):
        assert waits(text), text
    for text in ("jax.device_get(x)", "int(jax.device_get(state.step))", "jnp.asarray(x)", "x.astype(float)"):
        assert not waits(text), text


NAMES = {path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.py")}


@pytest.mark.parametrize("name", sorted(NAMES - OUTSIDE))
def test_nothing_in_train_waits_for_the_device_unseen(name):
    waiting = waits((FOLDER / name).read_text(encoding="utf-8"))
    allowed = {"evaluate.py": 2}  # sums that `jax.device_get` has fetched in the line above
    assert len(waiting) <= allowed.get(name, 0), waiting
