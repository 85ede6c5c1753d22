"""The tables and plots of recorded results, by verb: values in readable units, and what was not measured."""

import json

import pytest

from tests.train_helpers import ROOT
from zaya_jax.lab.result_plots import draw
from zaya_jax.lab.result_tables import TABLES
from zaya_jax.run.table import number

STEP = {
    "steps": 3, "seconds": 0.3, "parts": {"attention": {"measured": 0.2, "predicted": 0.1, "roofline": None}},
    "exposed_collectives": 0.05, "overlapped_collectives": 0.01, "overlap": 0.2, "unattributed": 0.05,
    "not_predicted": None, "what": "decode step", "untraced_seconds": 0.25, "estimated_seconds": 0.123,
}  # fmt: skip


def result(verb):
    if verb == "step":
        return STEP
    file = "context_cpu" if verb == "context" else f"machine_cpu/{verb}"
    found = json.loads((ROOT / f"benchmarks/{file}.json").read_text(encoding="utf-8"))
    if verb == "gemm":
        found["results"].append({"family": "attention", "name": "64 tokens", "length": 64, "flops": 2e9,
                                 "query heads per key head": 1, "failed": "Out of memory."})  # fmt: skip
    return found


@pytest.mark.parametrize(("verb", "row"), [
    ("step", ["attention", "200", "66.7 %", "100", "–"]),
    ("step", ["exposed collectives", "50.0", "16.7 %", "–", "–"]),
    ("gemm", ["64 tokens", "2.00", "–", "–", "–"]),
])  # fmt: skip
def test_values_are_shown_in_readable_units(verb, row):
    assert row in [list(cells) for table in TABLES[verb](result(verb)) for cells in table.rows]


@pytest.mark.parametrize("verb", TABLES)
def test_every_result_has_tables_without_gaps(verb):
    tables = TABLES[verb](result(verb))
    cells = [cell for table in tables for row in table.rows for cell in row]
    assert cells
    assert not {"None", "nan", ""} & set(map(str, cells)) - ({""} if verb == "sizing" else set())


def test_numbers_have_three_digits():
    assert [number(x) for x in (0, 0.000012345, 0.5, 99.96, 1234.5, None)] == [
        "0", "1.23e-05", "0.500", "100", "1,234", "–"]  # fmt: skip
    assert number(2.5e9, 1e9) == "2.50"


@pytest.mark.parametrize("verb", ["memory", "gemm", "collectives", "step", "context"])
def test_every_plot_is_drawn(verb, tmp_path):
    draw(verb, tmp_path / "plot.png", result(verb))
    assert (tmp_path / "plot.png").read_bytes()[:4] == b"\x89PNG"


def test_results_with_nothing_to_plot_have_no_plot(tmp_path):
    draw("gemm", tmp_path / "plot.png", result("gemm") | {"maximum": 0.0})
    assert not [*tmp_path.iterdir()]
