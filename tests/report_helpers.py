"""The file of a report that `make gpu-report` made on a CPU with two simulated devices, and the form of its parts."""

import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "benchmarks" / "report_cpu.json"
CPU = json.loads(FILE.read_text(encoding="utf-8"))
_HEADER = {"part", "date", "seconds", "benchmark", "size", "command", "peer", "versions", "hardware", "commit"}
AGAIN = (
    "make gpu-report with JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=2 and REPORT='--folder …' writes tests/benchmarks/"
    "report_cpu.json again; if `adopt` reads what has changed, count up its SCHEMA"
)


def check_form(name: str, result: dict[str, Any]) -> None:
    """Fail unless what a part of the writer returns has the keys of the recorded report."""
    assert {*result} - {"failed"} - _HEADER == {*CPU["parts"][name]} - _HEADER, AGAIN
