"""A job of several processes that checks its devices, and measures collectives, together."""

import json

import pytest

from tests.job.processes_helpers import finish_job, start_job
from tests.lab.helpers import parse_rows

# Those that processes do by an all-reduce, and one that they do as devices of one process.
OPERATIONS = ["broadcast", "reduce_scatter", "all_to_all"]
# Both verbs in the same processes, which join their job once.
CODE = f"""
OPERATIONS = {OPERATIONS}
import zaya_jax.main
from zaya_jax.machine import __main__ as machine
from zaya_jax.lab.measure.preflight import Sizes

def main(arguments):
    folder, *job = arguments
    flags = ["--tolerance", "95", "--output", folder + "preflight"]
    status = machine.main(["preflight", "configs/tiny.yaml", *flags, *job])
    from zaya_jax.job import multihost
    multihost.join = lambda *_: None
    sizes = ["--operations", *OPERATIONS, "--min-bytes", "512", "--max-bytes", "512", "--repeats", "1"]
    return status or machine.main(["collectives", *sizes, "--output", folder + "collectives", *job])

from zaya_jax.lab.measure.collectives import programs
from zaya_jax.lab.measure import preflight as probes
programs.COLLECTIVES, programs.CHECKED = {{"permute": programs.COLLECTIVES["permute"]}}, ("int32",)
probes.CPU = Sizes(256, "float32", 2**20, 2**12)
zaya_jax.main.main = main
"""


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.soak)])
def job(request, tmp_path_factory):
    """The results of process 0, and what each process said."""
    folder = tmp_path_factory.mktemp("job")
    ends = finish_job(
        folder, start_job(folder, [[f"{folder}/{index}"] for index in range(request.param)], 4, code=CODE)
    )
    assert [status for status, _ in ends] == [0] * request.param, ends
    assert sorted(path.name for path in folder.glob("*[!g]")) == ["0collectives", "0preflight"]
    preflight, collectives = (json.loads((folder / f"0{verb}").read_text()) for verb in ("preflight", "collectives"))
    return preflight, collectives, [said for _, said in ends]


def test_processes_check_their_devices_together(job):
    result, _, said = job
    assert "All checks pass." in said[0]
    assert not any("PASS" in other for other in said[1:])  # process 0 speaks
    assert result["hardware"] | {"device": "4 × cpu", "processes": len(said)} == result["hardware"]
    assert [check["check"] for check in result["checks"]][-2:] == ["all_reduce", "all_gather"]


def test_processes_measure_collectives_together(job):
    _, result, said = job
    assert {row["operation"] for row in result["results"]} == {
        "bcast_via_allreduce", "reduce_scatter_via_allreduce", "all_to_all"}  # fmt: skip
    assert {(row["devices"], row["wrong"]) for row in result["results"]} == {(4, 0)}
    rows = parse_rows(said[0])
    assert len(rows) == len(result["results"])
    assert {(row["wrong"], row["wrong_in_place"]) for row in rows} == {("0", "0")}
    assert not any(parse_rows(other) for other in said[1:])  # process 0 speaks


def test_a_process_that_fails_ends_the_others_with_its_reason(tmp_path):
    code = """
import zaya_jax.main
from zaya_jax.machine import __main__ as machine
zaya_jax.main.main = lambda arguments: machine.main(["collectives", *arguments])
"""
    ends = finish_job(tmp_path, start_job(tmp_path, [[], ["--fsdp", "3"]], 2, code=code))
    assert [status for status, _ in ends] == [2, 2]
    assert all("--fsdp 3 is 3, but must divide 2, the number of devices." in said for _, said in ends)
