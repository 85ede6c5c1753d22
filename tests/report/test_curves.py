"""What is read of the rows of a run: every value of every step, whatever a row lacks or has too much."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zaya_jax.aegis.report.curves import FRAMES, MAPS, History

NUMBERS = st.one_of(st.floats(allow_nan=True), st.integers(), st.booleans())
OTHERS = st.one_of(st.none(), st.text(max_size=3), st.lists(NUMBERS, max_size=3),
                   st.dictionaries(st.text(max_size=2), NUMBERS))  # fmt: skip
VALUES = NUMBERS | OTHERS
KEYS = ["loss", "load_entropy", "max_load", "expert_counts", "phase", "skip", "rows", "loss_by_source"]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@given(st.lists(st.dictionaries(st.sampled_from(KEYS), VALUES), min_size=1, max_size=8))
def test_rows_with_any_values_are_read_and_each_number_is_at_its_step(tmp_path_factory, rows):
    rows = [{"step": step, **row} for step, row in enumerate(rows, 5)]
    history = History(write(tmp_path_factory.mktemp("rows") / "metrics.jsonl", rows))
    assert list(history.steps) == [row["step"] for row in rows]
    read = dict(zip(history.line("loss").steps, history.line("loss").values, strict=True))
    expected = {row["step"]: float(row["loss"]) for row in rows
                if isinstance(row.get("loss"), int | float) and math.isfinite(row["loss"])}  # fmt: skip
    assert {step: value for step, value in read.items() if math.isfinite(value)} == expected
    assert history.skipped == sum("skip" in row for row in rows)


def test_layers_and_experts_are_reduced(tmp_path):
    rows = [{"step": step, "load_entropy": [0.5, 1.0], "max_load": [3.0, 1.0], "expert_counts": [[6, 2, 9], [4, 4, 0]],
             "grad_norm_by_role": {"expert": step}} for step in range(1, 5)]  # fmt: skip
    history = History(write(tmp_path / "metrics.jsonl", rows))
    assert list(history.line("load_entropy", "mean").values) == [0.75] * 4
    assert list(history.line("load_entropy", "lowest").values) == [0.5] * 4
    assert list(history.line("max_load", "highest").values) == [3.0] * 4
    assert history.loads.items[0] == [[1.5, 0.5], [1.0, 1.0]]  # skip, the last one, is no expert
    assert history.parts("grad_norm_by_role") == ["expert"]
    assert history.last("loss") is None


@pytest.mark.parametrize(("second", "said"), [
    ('{"step": 2, "loss": 1', "Line 2 of {path} is damaged; the rows from there on are not shown."),
    ("[2]", "Line 2 of {path} is damaged"),
    ('{"step": 10000000000000000000000}', "Line 2 of {path} is damaged"),
    ('{"step": 1}', "Line 2 of {path} has step 1 after step 1; the rows from there on are not shown."),
])  # fmt: skip
def test_a_damaged_row_ends_the_history_and_is_said(second, said, tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n' + second + '\n{"step": 3}\n')
    history = History(path)
    assert list(history.steps) == [1]
    assert history.problem.startswith(said.format(path=path))


def test_a_row_that_is_being_written_is_no_damage(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    history = History(path)
    assert (list(history.steps), history.problem) == ([1], "")


def test_a_long_run_keeps_few_maps(tmp_path):
    rows = ({"step": step, "load_entropy": [0.5], "expert_counts": [[1, 1, 0]]} for step in range(1, 5001))
    history = History(write(tmp_path / "metrics.jsonl", rows))
    assert len(history.steps) == 5000
    assert MAPS / 2 <= len(history.entropy.steps) <= MAPS + 1
    assert FRAMES / 2 <= len(history.loads.steps) <= FRAMES + 1
    assert history.loads.steps[-1] == history.entropy.steps[-1] == 5000
