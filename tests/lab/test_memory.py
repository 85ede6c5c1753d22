"""Memory bandwidth: results and rates of the operations, and input."""

import json

import pytest

from zaya_jax.lab.measure.memory import KERNELS, summarize, time_kernel
from zaya_jax.machine.__main__ import main


@pytest.mark.parametrize("name", KERNELS)
def test_each_operation_returns_what_it_should(name, monkeypatch):
    assert len(time_kernel(name, 4096, 3)) == 3
    right = KERNELS[name]
    monkeypatch.setitem(KERNELS, name, right._replace(run=lambda a, b: 5 * right.run(a, b)))
    with pytest.raises(RuntimeError, match=f"{name} returned"):
        time_kernel(name, 4096, 1)


def test_rates_count_arrays_at_the_shortest_time():
    triad, copy = summarize(1000, {name: [2.0, 0.5, 1.0] for name in ("Triad", "Copy")})
    assert (triad["bytes_per_second"], copy["bytes_per_second"]) == (3 * 1000 / 0.5, 2 * 1000 / 0.5)


def test_the_command_measures_the_model(tmp_path, capsys):
    path, png = tmp_path / "memory.json", tmp_path / "memory.png"
    flags = ["--sizes", "64K", "16K", "--config", "configs/tiny.yaml", "--repeats", "2"]
    assert main(["memory", *flags, "--output", str(path), "--png", str(png)]) == 0
    result = json.loads(path.read_text())
    assert [row["bytes"] for row in result["results"]] == [2**14] * 5 + [2**16] * 5
    assert {row["operation"] for row in result["operations"]} == {"residual_norm", "residual_norm backward"}
    printed = capsys.readouterr().out
    assert "of triad" in printed
    assert {"copy", "mul", "add", "triad", "dot"} <= set(printed.split())
    assert png.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(("arguments", "message"), [
    ("--sizes 1X", "--sizes is '1X', but must be a number of bytes, such as 8, 64K, 16M or 1G."),
    ("--sizes 64", f"--sizes is 64, but must be at least {4096}."),
    ("--config no.yaml", "no.yaml"),
])  # fmt: skip
def test_bad_input_is_named(arguments, message, capsys):
    assert main(["memory", *arguments.split()]) == 2
    assert message in capsys.readouterr().err
