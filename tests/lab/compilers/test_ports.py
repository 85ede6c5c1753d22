"""A training step with the ports in place of the Pallas kernels that they replace, compiled for AMD GPUs.

`python -m tests.lab.compilers.test_ports` writes `benchmarks/ports_step.json`.
"""

import collections
import json
import re

import pytest

pytest.importorskip("triton", reason="the extra ports, with Python 3.12")
from tests.lab.compilers.ports import PORTS, SUFFIX
from tests.lab.compilers.test_compiled import SMALL, need_stand_ins
from tests.train_helpers import ROOT
from zaya_jax.config import load_config
from zaya_jax.lab.predict.compilers import compiled
from zaya_jax.lab.predict.compilers.hlo import walk
from zaya_jax.lab.predict.compilers.predict import launches
from zaya_jax.lab.result import describe_run

pytestmark = pytest.mark.compilers


def both_steps(config, gpu, devices):
    """What a step launches, how much memory it needs, and the largest resources of each kernel: by Pallas, by ports."""
    with pytest.MonkeyPatch.context() as patch:
        pallas = compiled.compile_step(config, 0, gpu, devices)
        patch.setattr(compiled, "WORKER", "tests.lab.compilers.ports")
        return {"pallas": describe(pallas), "ports": describe(compiled.compile_step(config, 0, gpu, devices))}


def describe(step):
    rows = collections.defaultdict(lambda: dict.fromkeys(("launches", "registers", "spills", "scratch", "shared"), 0))
    for place in walk(step.entry):
        for instruction in place.instructions:
            if instruction.custom_call == "__gpu$xla.gpu.triton":
                rows[instruction.attribute(r'\bname = "([^"]+)"')]["launches"] += place.times
    for kernel in step.kernels:
        if row := rows.get(kernel.family):
            row.update({key: max(value, getattr(kernel, key)) for key, value in row.items() if key != "launches"})
    needs = {"temporary": step.memory["temporaries"], "peak": step.peak_memory, "of_host": step.host_bytes}
    return {
        "launches": launches(step.entry),
        "bytes": needs,
        "seconds": step.seconds,
        "kernels": dict(sorted(rows.items())),
    }


def test_a_step_with_ports_is_that_of_pallas_but_for_them():
    need_stand_ins("mi300x")
    steps = both_steps(load_config(ROOT / "configs/tiny.yaml", [*SMALL, "model.num_layers=1"]), "mi300x", 2)
    pallas, ports = steps["pallas"], steps["ports"]
    assert {name for name in ports["kernels"] if name.endswith(SUFFIX)} == {name + SUFFIX for name in PORTS}
    counts = collections.Counter()
    for name, row in ports["kernels"].items():
        counts[name.removesuffix(SUFFIX)] += row["launches"]
    assert counts == {name: row["launches"] for name, row in pallas["kernels"].items()}
    assert ports["launches"] == pallas["launches"]
    assert ports["bytes"]["temporary"] == pallas["bytes"]["temporary"]
    assert not [name for name, row in ports["kernels"].items() if row["spills"] or row["scratch"]]


def main():
    result = describe_run("ports in a step", "bench_8b, 8 mi300x", "Pallas", ("triton", "jax-rocm7-pjrt"))
    result |= both_steps(load_config(ROOT / "configs/bench_8b.yaml"), "mi300x", 8)
    by_row = re.sub(r"\{[^{}]*\}", lambda row: " ".join(row[0].split()), json.dumps(result, indent=1))
    (ROOT / "benchmarks/ports_step.json").write_text(by_row + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
