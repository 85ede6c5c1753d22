"""The page about a real run of two phases that was killed and restarted by its supervisor."""

import json

import pytest

from tests.aegis.real_helpers import Run
from tests.browser_helpers import Page, look
from zaya_jax.aegis.supervision_report import describe_nodes
from zaya_jax.report.__main__ import main

PHASES = [{"name": "one", "tokens": 10 * 128}, {"name": "two", "tokens": 10 * 128, "context": 16}]


@pytest.mark.soak
def test_a_fault_its_recovery_and_goodput_are_shown(tmp_path):
    run = Run(tmp_path, 1, 20, "disturbed", f"phases={json.dumps(PHASES)}")
    supervised = run.start("sigkill@0:6:data")
    assert supervised.wait(300) == 0, supervised.said
    path = tmp_path / "page.html"
    assert main([str(run.run_dir), "--output", str(path)]) == 0
    page = Page(path.read_text())
    ((name, node),) = describe_nodes(run.run_dir).items()
    (fault,) = [row for row in page.rows if "signal-SIGKILL" in row]
    assert fault[1:3] + fault[4:7] == [name, "crash", "0", "6", "restart"]
    assert float(fault[8]) > 0  # seconds until it trained again
    assert page.cells("faults") == ["1, in 1 attempt"]  # goodput excludes attempts in which a drill makes a fault
    assert page.cells("goodput")[0].startswith(f"{100 * node['goodput']['fraction']:.1f} % of ")
    assert page.cells("steps") == ["20 of 20"]
    seen = {plot["title"]: plot for plot in look(path, 1200, tmp_path)["plots"]}
    assert seen["Where the time went"]["marks"] >= 3
    assert all(plot["marks"] for plot in seen.values())
