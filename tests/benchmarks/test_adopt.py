"""A report of a GPU is read back: what is kept, where it is placed, what follows from it, and what is refused."""

import contextlib
import copy
import functools
import html
import json
import operator
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from benchmarks.__main__ import main
from benchmarks.adopt import adopt
from benchmarks.gpu_report import report_file
from benchmarks.gpu_report.report_file import kernel_digests, read_report
from benchmarks.gpu_report.runner import gpu_report, make_parts
from tests.lab.compilers.test_schedule import TEXT
from tests.report_helpers import AGAIN, CPU, FILE, check_form
from tests.train_helpers import ROOT
from zaya_jax.errors import InputError
from zaya_jax.lab.measure.step_parts import configuration
from zaya_jax.lab.measure.step_trace import Interval, Trace
from zaya_jax.lab.predict import calibration
from zaya_jax.lab.predict.compilers.hlo import parse, walk
from zaya_jax.lab.predict.compilers.predict import WHOLE, instruction_work
from zaya_jax.lab.predict.step_time import basis
from zaya_jax.ops.kernel_table import parse_table

MI300X, FOLDER, TABLES = "AMD Instinct MI300X", "benchmarks/gpu/amd_instinct_mi300x", "zaya_jax/ops/tables"
RATES = "zaya_jax/lab/predict/calibrations"


def traced(kind):
    """What the writer records of a program that was traced on a device, each launch 10 µs."""
    entry, now, seen = parse(TEXT), 0.0, []
    for place in walk(entry):
        for x in place.instructions:
            if instruction_work(place, x):
                seen += [
                    Interval(now + 1e4 * i, now + 1e4 * (i + 1), "layers", x.opcode, x.name) for i in range(place.times)
                ]
                now += 1e4 * place.times
    return configuration(Trace(seen, entry, 0, 1, now / 1e9, kind, 1), WHOLE, 1, now / 1e9)


def on_mi300x():
    """The report of the CPU, as if an MI300X had made it at full size."""
    report = copy.deepcopy(CPU) | {"device": MI300X}
    for part in report["parts"].values():
        part |= {"size": "full", "hardware": part["hardware"] | {"device": MI300X}}
        part.pop("configurations", None)  # empty, since a CPU has no data sheet
    report["parts"]["tune"]["table"]["device"] = MI300X
    step = report["parts"]["step"]
    step["configurations"] = {"step of 2 layers, data": traced(MI300X)}
    step["figures"] |= {"step": [2.0, "s", 1.0, 3.0], "speed": [8.0, "tokens/s", 1.0, 4.0]}
    return report


@pytest.fixture
def clone(tmp_path):
    """The files of the repository that adopting reads and writes."""
    root = tmp_path / "clone"
    for folder in ("benchmarks/gpu", TABLES, RATES):
        shutil.copytree(ROOT / folder, root / folder)
    (root / "docs").mkdir()
    for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        shutil.copy(path, root / path.relative_to(ROOT))
    return root


@pytest.fixture
def adopted(clone, tmp_path, capsys):
    """Adopt a report, and return the paths of what differs, and what was printed."""

    def run(report, **options):
        file = tmp_path / "report.json"
        file.write_text(report if isinstance(report, str) else json.dumps(report))
        differ, _ = adopt(clone, file, **{"dry_run": False, **options})
        return differ, capsys.readouterr().out

    return run


def content(root):
    return {path: path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def test_the_recorded_report_has_the_form_that_the_writer_gives_it(tmp_path):
    """Of one part; CI passes the whole file that it has made, and tests of other parts compare theirs."""
    made = os.environ.get("GPU_REPORT")
    if not made:
        gpu_report(str(tmp_path), ["machine"], 9, "abc")
    written = json.loads(Path(made or tmp_path / "cpu.json").read_text(encoding="utf-8"))
    assert written.keys() == CPU.keys(), AGAIN
    assert CPU["parts"].keys() == {"machine", *make_parts(True, 2, tmp_path)}
    assert not made or written["parts"].keys() == CPU["parts"].keys()
    for name, part in written["parts"].items():
        assert part.keys() == CPU["parts"][name].keys(), AGAIN
        check_form(name, part)
    assert written["schema"] == CPU["schema"] == report_file.SCHEMA


def test_what_a_cpu_measured_is_kept_and_shown_and_chooses_nothing(adopted, clone):
    before = content(clone)
    differ, out = adopted(CPU, dry_run=True)
    assert content(clone) == before
    assert "+| 2 × cpu |" in out
    assert adopted(CPU)[0] == differ
    parts = {f"benchmarks/gpu/cpu/{name}.json" for name in CPU["parts"]}
    assert set(differ) == {*parts, "README.md", "docs/gpu.md", "docs/compare.md"}
    for name, part in CPU["parts"].items():
        kept = json.loads((clone / f"benchmarks/gpu/cpu/{name}.json").read_text())
        assert kept == {key: part[key] for key in part if key != "table"}
    assert f"{len(parts)} of {len(parts)} parts of cpu are kept" in out
    assert "1 operations were emulated" in out
    assert "No rates for predictions follow. There is no data sheet of the device (cpu)." in out
    again, out = adopted(CPU)
    assert again == []
    assert out.endswith("No file differs.\n")


def test_the_page_shows_it(adopted, clone):
    adopted(CPU)
    page = MarkdownIt("commonmark").enable("table").render((clone / "docs/gpu.md").read_text(encoding="utf-8"))
    assert "<td>2 × cpu</td>" in page
    speed = CPU["parts"]["step"]["tokens_per_second"] / 2
    assert f"<td>{speed:,.0f}</td>" in page
    assert "<td>43,482</td>" in page


def test_the_site_is_built_from_it(adopted, clone):
    pytest.importorskip("sphinx")  # make docs
    adopted(CPU)
    shutil.copytree(ROOT / "docs", clone / "docs", dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.md"))
    only = ["-D", "include_patterns=docs/index.md,docs/gpu.md", "-D", "root_doc=docs/gpu", "-D", "extensions=myst_nb"]
    command = [sys.executable, "-m", "sphinx", "--quiet", "--conf-dir", "docs", *only, ".", "site"]
    subprocess.run(command, cwd=clone, check=True, env={"PYTHONPATH": str(ROOT), "PATH": ""})
    assert "2 × cpu" in (clone / "site/docs/gpu.html").read_text(encoding="utf-8")


def test_what_a_gpu_measured_chooses_kernels_and_replaces_ranges(adopted, clone, monkeypatch):
    monkeypatch.setattr(calibration, "_SHIPPED", clone / RATES)
    assert basis(calibration.get_device("mi300x", 1), "mi300x").startswith("Times are ranges")
    report = on_mi300x()
    differ, out = adopted(report)
    assert {f"{TABLES}/amd_instinct_mi300x.json", f"{RATES}/mi300x.json", "docs/accuracy.md"} < set(differ)
    measured = calibration.get_device("mi300x", 1)
    assert basis(measured, "mi300x").startswith(f"Times are predicted from what one {MI300X} took on")
    assert measured.rates
    assert f"{len(measured.rates)} measured rates predict for mi300x, 0 of them" in out
    table = json.loads((clone / f"{TABLES}/amd_instinct_mi300x.json").read_text())
    parse_table(table, MI300X, "")
    assert table["operations"] == report["parts"]["tune"]["table"]["operations"]
    assert table["commit"] == report["parts"]["tune"]["commit"]
    assert f"## {MI300X}\n\n| program |" in (clone / "docs/accuracy.md").read_text(encoding="utf-8")
    for page in ("README.md", "docs/gpu.md"):
        text = (clone / page).read_text(encoding="utf-8")
        assert f"| 2 × {MI300X} |" in text
        assert "| MI300X | – |" not in text
    lines = {tuple(line.split()[:3]): line for line in out.splitlines()}
    assert "1.00 to 3.00  inside" in lines["step", "step", "s"]
    assert "1.00 to 4.00  2.00 × its end" in lines["step", "speed", "tokens/s"]
    assert "1 of 2 figures with a prediction are inside its range." in out
    assert adopted(report)[0] == []


def test_a_table_keeps_what_was_measured_before(adopted, clone):
    report = on_mi300x()
    adopted(report)
    first = copy.deepcopy(report["parts"]["tune"]["table"]["operations"]["residual_norm"]["sizes"])
    report["parts"]["tune"]["table"]["operations"]["residual_norm"]["sizes"][0]["rows"] = 2 * first[0]["rows"]
    adopted(report)
    table = json.loads((clone / f"{TABLES}/amd_instinct_mi300x.json").read_text())
    sizes = table["operations"]["residual_norm"]["sizes"]
    assert sizes == first + report["parts"]["tune"]["table"]["operations"]["residual_norm"]["sizes"]
    report["parts"]["tune"]["table"]["operations"]["residual_norm"]["sources"] = "of other kernels"
    differ, _ = adopted(report)
    assert f"{FOLDER}/tune.json" in differ
    assert json.loads((clone / f"{TABLES}/amd_instinct_mi300x.json").read_text()) == table


def test_a_kernel_that_was_measured_again_has_only_its_new_rates(adopted, clone):
    """The H200 was measured with kernels that have changed since; its other rates stay."""
    rates = json.loads((clone / f"{RATES}/h200.json").read_text())["rates"]
    report = json.loads(json.dumps(on_mi300x()).replace(MI300X, "NVIDIA H200"))
    ran = report["parts"]["step"]["configurations"]["step of 2 layers, data"]
    old = next(row["work"] for row in rates if row["sources"] not in (None, calibration.kernel_sources(row["work"])))
    work = dict(ran["works"][0]) | {"kernel": old, "flops": 1e9, "seconds": 1e-3, "times": 1}
    ran["works"].append(work)
    ran["sources"][old] = calibration.kernel_sources(old)
    adopted(report)
    new = json.loads((clone / f"{RATES}/h200.json").read_text())["rates"]
    assert [row["sources"] for row in new if row["work"] == old] == [ran["sources"][old]]
    assert {row["work"] for row in rates} <= {row["work"] for row in new}


CASES = {
    "is not JSON": lambda report: json.dumps(report)[:-9],
    "is not a JSON object": lambda report: [report],
    "is not what make gpu-report wrote": lambda report: report | {"benchmark": "kernels"},
    "it has schema 1, but this version reads 2": lambda report: report["parts"]["step"],
    "it has schema 3, but this version reads 2": lambda report: report | {"schema": 3},
    "without a device, kernels or parts": lambda report: report | {"parts": []},
}


@pytest.mark.parametrize("message", CASES)
def test_nothing_is_written_from_a_file_that_is_no_report(message, adopted, clone):
    before = content(clone)
    with pytest.raises(InputError, match=re.escape(message)):
        adopted(CASES[message](copy.deepcopy(CPU)))
    assert content(clone) == before


def test_the_path_out_of_the_folder_is_no_device(adopted):
    with pytest.raises(InputError, match="it is damaged"):
        adopted(CPU | {"device": "|../\n"})


def test_what_cannot_be_used_is_named_and_counted(adopted, clone):
    adopted(CPU)
    report, own = copy.deepcopy(CPU), kernel_digests()
    report["kernels"] = own | {"attention": "0", "experts": "0"}
    parts = report["parts"]
    parts["step"] = 3
    parts["decode"]["hardware"]["device"] = "cpu of another kind"
    parts["kernels"]["date"] = "2001-01-01"
    parts["state"] |= {"failed": "It broke.", "date": "2100-01-01"}
    parts["context"] |= {"failed": "It broke, too.", "date": "2100-01-02"}
    (clone / "benchmarks/gpu/cpu/context.json").unlink()
    parts["tune"]["table"]["operations"]["residual_norm"] = {}
    parts["../../x"] = parts["machine"] | {"part": "../../x"}
    _, out = adopted(report)
    count = len(CPU["parts"])
    for line in (
        f"{count - 5} of {count + 1} parts of cpu are kept",
        "step is not used: it is damaged (TypeError",
        "decode is not used: it was measured on 'cpu of another kind', not on cpu.",
        "tune is not used: it is damaged (InputError: its table is not a table of measured kernels",
        "../../x is not used: it is not a part of that name.",
        "kernels is not used: it is of 2001-01-01, but ",
        "state is not used, since it failed: It broke.",
        "context is kept, but nothing follows from it, since it failed: It broke, too.",
        f"2 of {len(own)} operations have other kernels here: attention, experts;",
    ):
        assert f"\n{line}" in out
    page = (clone / "docs/gpu.md").read_text(encoding="utf-8")
    assert "2100-01-01" not in page
    assert re.search(r"\| 2 × cpu \| 2100-01-02 \| .*\| context \|", page)


def test_of_two_reports_of_a_day_the_later_one_is_kept(adopted):
    for time, kept in (("10:00:00", True), ("09:59:59", False), ("10:00:01", True)):
        report = copy.deepcopy(CPU)
        for part in report["parts"].values():
            part["date"] = f"2026-11-28T{time}Z"
        differ, out = adopted(report)
        assert ("benchmarks/gpu/cpu/step.json" in differ) == kept
        assert ("step is not used: it is of 2026-11-28T09:59:59Z, but 2026-11-28T10:00:00Z is recorded." in out) != kept


def test_texts_of_a_report_are_no_cells_tags_links_or_code(adopted, clone):
    evil, report = "a|b <script>x</script> `c` [d](e) \\ \n<!-- end -->", on_mi300x()
    step = report["parts"]["step"]
    (ran,) = step["configurations"].values()
    step["configurations"] = {evil: ran}
    step["versions"]["jax"] = evil
    report["parts"]["decode"] |= {"failed": "\x1b[31m"}
    report["parts"]["machine"]["devices"] = evil
    _, out = adopted(report)
    assert "\x1b" not in out
    assert "machine is not used: it is damaged" in out
    shown = html.escape(" ".join(evil.split()))
    for page in ("docs/accuracy.md", "docs/compare.md"):
        text = MarkdownIt("commonmark").enable("table").render((clone / page).read_text(encoding="utf-8"))
        assert re.search(f"<td>[^<]*{re.escape(shown)}</td>", text)
        assert "<script" not in text
    assert adopted(report)[0] == []


PLACES = st.sampled_from(
    ["", "parts", "parts step", "parts step figures", "parts step configurations", "parts tune table"]
)
JUNK = st.sampled_from([None, 3, -1.5, float("nan"), "x", "2026-13-01", [], {}, [[]], {"a": {}}])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(place=PLACES, path=st.lists(st.integers(0, 99), min_size=1, max_size=4), junk=JUNK)
def test_damage_leaves_the_other_parts(place, path, junk, tmp_path):
    """Any value in the file, replaced by another, is refused with a sentence, or costs at most its own part."""
    report = on_mi300x()
    report["parts"] = {name: report["parts"][name] for name in ("machine", "step", "tune")}
    names = place.split()
    node = functools.reduce(operator.getitem, names, report)
    for index in path:
        name = [*node][index % len(node)] if isinstance(node, dict) else index % len(node)
        holder, node = node, node[name]
        names.append(name)
        if not (node and isinstance(node, (dict, list))):
            break
    holder[names[-1]] = junk
    file = tmp_path / "report.json"
    file.write_text(json.dumps(report))
    empty = tmp_path / "clone"
    if len(names) == 1:
        with contextlib.suppress(InputError):
            adopt(empty, file, dry_run=True)
        return
    differ, _ = adopt(empty, file, dry_run=True)
    others = {f"{FOLDER}/{name}.json" for name in report["parts"] if name not in names[1:2]}
    assert others <= set(differ)


def test_the_command_adopts_a_file_and_fails_if_a_part_cannot_be_used(monkeypatch, clone, tmp_path, capsys):
    monkeypatch.setattr("benchmarks.adopt._ROOT", clone)
    assert main(["adopt", str(FILE), "--dry-run"]) == 0
    assert "files differ; nothing is written:" in capsys.readouterr().out
    file = tmp_path / "report.json"
    file.write_text(json.dumps(CPU | {"parts": {**CPU["parts"], "step": 3}}))
    assert main(["adopt", str(file)]) == 1
    assert main(["adopt", str(tmp_path / "missing.json")]) == 2
    assert "missing.json cannot be read" in capsys.readouterr().err
    assert read_report(FILE).problems == []
