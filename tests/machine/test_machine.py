"""What a machine is, and what every result and command of `machine` and the benchmarks shares."""

import json
import re
import sys

import pytest

from benchmarks.__main__ import main as bench
from zaya_jax.lab.measure import installation as module
from zaya_jax.lab.measure.installation import describe_machine
from zaya_jax.lab.result import describe_run, write_result
from zaya_jax.machine.__main__ import main


def test_a_machine_is_described_without_what_is_private(monkeypatch, capsys):
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    monkeypatch.setenv("SECRET", "word")
    assert main(["describe"]) == 0
    text = capsys.readouterr().out
    machine = json.loads(text)
    assert (machine["platform"], machine["preset"]) == ("cpu", "cpu")
    assert machine["devices"] >= 1
    assert machine["host_bytes"] > 2**28
    assert machine["environment"]["XLA_FLAGS"] == "--xla_cpu_enable_fast_math=false"
    assert "word" not in text


def test_a_gpu_that_jax_does_not_use_is_a_failure(monkeypatch):
    monkeypatch.setattr(module, "detect_gpu_plugin", lambda root: "rocm")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert "failed" not in describe_machine()
    monkeypatch.delenv("JAX_PLATFORMS")
    assert "pip install -e '.[rocm]'" in describe_machine()["failed"]


def test_a_result_says_how_and_where_it_was_measured(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "orig_argv", ["/bin/python", "-m", "benchmarks", "step", "--config", "a b.yaml"])
    head = describe_run("speed", "large", "another", ["numpy", "no-such-package"])
    assert (head["benchmark"], head["size"], head["peer"]) == ("speed", "large", "another")
    assert head["command"] == "python -m benchmarks step --config 'a b.yaml'"
    assert head["versions"].keys() == {"python", "zaya-jax", "jax", "jaxlib", "numpy", "no-such-package"}
    assert head["versions"]["no-such-package"] == "not installed"
    assert head["hardware"].keys() == {"machine", "cpu", "cpus"}
    write_result(head, str(tmp_path / "result.json"))
    write_result(head, None)
    assert json.loads((tmp_path / "result.json").read_text()) == head


@pytest.mark.parametrize(("command", "match"), [
    ([main, "context", "--repeats", "0"], "--repeats is 0"),
    ([main, "kernels", "--output", "/no/such/folder/result.json"], "--output is '/no/such/folder/result.json'"),
    ([main, "context", "--png", "/tmp"], "--png is '/tmp'"),
    ([bench, "data", "--repeats", "0"], "--repeats is 0"),
    ([bench, "step", "--whole", "--output", "/tmp"], "--output is '/tmp'"),
    ([bench, "step", "train.batch.tokens=16"], "train.batch.tokens=16"),
    ([bench, "step", "--whole", "--dtype", "float32"], "--dtype"),
    ([bench, "checkpoint", "--gib", "0"], "--gib is 0.0"),
    ([bench, "checkpoint", "--folder", "/no/such"], "--folder is '/no/such'"),
    ([bench, "ablations", "--steps", "3"], "--steps is 3"),
])  # fmt: skip
def test_what_cannot_be_measured_or_written_is_told_before_measuring(capsys, command, match):
    run, *arguments = command
    assert run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("Error: ")
    assert err.count("\n") == 1
    assert match in err


@pytest.mark.parametrize(("run", "verb"), [
    *((main, verb) for verb in ("describe", "context", "kernels")),
    *((bench, verb) for verb in ("step", "data", "checkpoint", "kernels", "ablations")),
])  # fmt: skip
def test_the_help_of_each_verb_ends_with_an_example(run, verb, capsys):
    with pytest.raises(SystemExit, match="0"):
        run([verb, "--help"])
    usage, description, *_, example = capsys.readouterr().out.strip().split("\n\n")
    assert usage.startswith("usage: ")
    assert len(description) > 60
    assert re.match(rf"example: python -m (benchmarks|zaya_jax\.machine) {verb}\b", example)
