import json

import pytest

from zaya_jax.lab.measure.context_attention import Case, Sizes, context_pass, measure_context
from zaya_jax.lab.result_plots import draw

SMALL = Sizes((256,), "float32", query_heads=2, kv_heads=1, channels=8, degrees=(1, 2))


@pytest.mark.soak
def test_every_case_is_measured_on_simulated_devices_and_written(tmp_path, capsys):
    png = tmp_path / "context.png"
    result = measure_context(SMALL, 1)
    draw("context", png, result)
    assert json.loads(json.dumps(result)) == result
    assert png.read_bytes()[:4] == b"\x89PNG"
    assert result["hardware"]["device"] == "8 × cpu, simulated"
    rows = {(row["attention"], row["devices"]): row for row in result["results"]}
    assert rows.keys() == {("all_gather", 1), ("all_gather", 2), ("ring", 2)}
    for row in rows.values():
        assert row["bytes_per_device"] == row["arguments"] + row["outputs"] + row["temporaries"]
        assert len(row["seconds"]) == 1
    # q and the gradient of the output have two heads, k and v one, and each token a document.
    assert rows["ring", 2]["arguments"] == 256 // 2 * (6 * 8 * 4 + 4)
    title, _, single, *_ = capsys.readouterr().out.splitlines()
    assert title.startswith("Context-parallel attention: memory per device and time")
    assert single.split()[:3] == ["256", "all_gather", "1"]


def test_a_pass_says_what_its_program_needs():
    step = context_pass(SMALL, Case("all_gather", 1, 256))
    memory = step()
    assert memory == step()
    assert memory["arguments"] == 256 * (6 * 8 * 4 + 4)
    assert memory["outputs"] >= 256 * 6 * 8 * 4
    assert memory["temporaries"] > 0
    assert (memory["donated"], memory["peak"]) == (0, None)
