"""Restarts of the real trainer after faults that drills do not make."""

import json

import pytest

from tests.aegis.aegis_helpers import left_running
from tests.aegis.real_helpers import Run, undisturbed


@pytest.mark.soak
def test_a_collective_that_the_others_do_not_join_is_recovered_from(tmp_path):
    """All processes then wait: no one is wrongly blamed, and the stacks tell where each waits."""
    expected = undisturbed(tmp_path, 2, 40)
    run = Run(tmp_path, 2, 40)
    timeouts = dict.fromkeys(("data", "dispatch", "device_wait", "floor"), 4.0)
    supervised = run.start("collective@1:9:data", policy={"timeouts": timeouts})
    assert supervised.wait(600) == 0, supervised.said
    assert run.made == 1
    end = supervised.kinds("end")[0]
    print(end)
    assert end["fault"] in ("hang", "crash")  # Gloo may notice that the sizes differ
    assert end.get("rank") in (None, 1)
    files = [file for event in supervised.kinds("act") for file in event.get("files", ())]
    if end["fault"] == "hang":
        stacks = "".join((supervised.folder / file).read_text() for file in files if file.endswith("1.stderr"))
        assert "gather_alone" in stacks
    assert run.results() == expected
    assert not left_running(tmp_path)


@pytest.mark.soak
def test_a_device_that_is_lost_is_left_out(tmp_path):
    """The next number of devices that divides the batches is one."""
    leaves, rows = undisturbed(tmp_path, 2, 40)
    run = Run(tmp_path, 2, 40)
    supervised = run.start("sigkill@1:9:data", policy={"rules": {"crash": "fewer_devices"}})
    assert supervised.wait(600) == 0, supervised.said
    (decided,) = supervised.kinds("decide")
    assert decided["action"] == "fewer_devices"
    assert [len(start["text"].split("--coordinator")) for start in supervised.kinds("start")] == [2, 1]
    assert [len(end["exit_statuses"]) for end in supervised.kinds("end")] == [2, 1]
    own_leaves, own_rows = run.results()
    assert own_leaves.keys() == leaves.keys()
    losses = [[json.loads(row)["loss"] for row in text.splitlines()] for text in (own_rows, rows)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
