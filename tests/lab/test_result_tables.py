"""The report: every kind of result, plots that open in a browser, text that is escaped, and input."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.browser_helpers import CHROMIUM, Page
from zaya_jax.lab.measure import context_attention as context
from zaya_jax.lab.measure.installation import describe_machine
from zaya_jax.lab.measure.preflight import Check
from zaya_jax.lab.report.page import VERBS
from zaya_jax.lab.result import describe_run
from zaya_jax.machine.__main__ import main
from zaya_jax.run.table import number

ROOT = Path(__file__).parents[2]


def header(benchmark: str, device: str = "cpu") -> dict:
    result = describe_run(benchmark, "small", "another", ("numpy",))
    result["hardware"]["device"] = device
    return result


def read(name):
    """A recorded result."""
    return json.loads((ROOT / "benchmarks" / f"{name}.json").read_text())


def recorded(name: str) -> dict:
    return read(f"{name}_cpu")


def preflight() -> dict:
    checks = [Check("kernels", "WARN", 0.0, "kernels", "momentum is slow."),
              Check("matmul", "PASS", 2.15e11, "FLOP/s", ""),
              Check("all_gather", "FAIL", 4.7e9, "bytes/s", "Slow: device 1.")]  # fmt: skip
    return header("preflight") | {"checks": [check._asdict() for check in checks],
                                  "failed": "Checks that fail: all_gather."}  # fmt: skip


def collectives() -> dict:
    half = {"p50": 8.2e-5, "p99": 9e-5, "min": 8e-5, "max": 9e-5, "mean": 8.3e-5, "cv": 0.05}
    half |= {"algbw": 3e9, "busbw": 6e9}
    case = {"operation": "all_reduce", "mode": "dispatch", "dtype": "float32", "devices": 4, "groups": 1,
            "axes": ["data"]}  # fmt: skip
    rows = [case | {"devices": devices, "bytes": size, "wrong": 0, "out_of_place": half, "in_place": half}
            for devices in (2, 4) for size in (64, 128)]  # fmt: skip
    rows[1]["peer_busbw"] = 5e9
    fit = {"alpha_seconds": {"value": 8.7e-5, "low": 8.2e-5, "high": 9.2e-5}, "half_bytes": 473646.4,
           "beta_bytes_per_second": {"value": 5.4e9, "low": 3.6e9, "high": None}, "knee_bytes": 4262817.6}  # fmt: skip
    message = {"operation": "all_reduce", "axes": ["data"], "bytes": 128, "times": 7, "seconds": 2e-3}
    return header("messages of a training step", "4 × cpu") | {
        "results": rows, "fits": [case | fit, case], "messages": [message], "traffic": {"eth0": 1234567},
    }  # fmt: skip


def step() -> dict:
    parts = {"attention": {"measured": 0.2, "predicted": 0.1, "roofline": None}}
    return header("decode step by part") | {
        "steps": 3, "seconds": 0.3, "parts": parts, "exposed_collectives": 0.05, "overlapped_collectives": 0.01,
        "overlap": 0.2, "unattributed": 0.05, "not_predicted": None, "what": "decode step", "untraced_seconds": 0.25,
        "estimated_seconds": 0.123,
    }  # fmt: skip


@pytest.fixture(scope="module")
def results() -> dict[str, dict]:
    """A result of every verb, by verb."""
    machine = describe_machine()
    machine["network"] = {"interfaces": {"eth0": {"state": "up", "speed": 100000}}, "plugins": {
        "librccl-net.so": {"files": ["/usr/lib/librccl-net.so"], "loaded": False}},
        "rdma": {"mlx5_0/1": {"link_layer": "Ethernet", "state": "ACTIVE", "rate": None}}}  # fmt: skip
    made = {"describe": machine, "preflight": preflight(), "collectives": collectives(), "step": step()}
    for verb in ("memory", "storage", "gemm"):
        made[verb] = read(f"machine_cpu/{verb}")
        made[verb]["hardware"] |= made["step"]["hardware"]
    made["sizing"] = read("machine_cpu/sizing")
    row = {"flops": 2e9, "warm_flops_per_second": 5e9, "cold_flops_per_second": 1e9}
    made["gemm"]["results"] += [
        {"family": "model", "name": "head, forward", **row},
        {"family": "attention", "name": "16 tokens", "length": 16, "query heads per key head": 2, **row},
        {"family": "attention", "name": "32 tokens", "length": 32, "query heads per key head": 2, **row},
        {"family": "attention", "name": "64 tokens", "length": 64, "query heads per key head": 1, "flops": 2e9,
         "failed": "Out of memory.\nA long trace."},
    ]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context, "_measure", lambda *_: {})
        made["context"] = context.measure_context(context.Sizes((8192,), "float32"), 1)
    made["context"]["results"] = recorded("context")["results"]
    return made


def write(folder: Path, results: dict[str, dict]) -> Path:
    for name, result in results.items():
        (folder / f"{name}.json").write_text(json.dumps(result))
    return folder


@pytest.fixture(scope="module")
def page(results, tmp_path_factory) -> Path:
    folder = write(tmp_path_factory.mktemp("machine"), results)
    assert main(["report", str(folder)]) == 0
    return folder / "report.html"


def test_every_result_has_a_section_with_tables(page, results):
    assert results.keys() == set(VERBS)
    text = page.read_text()
    elements = Page(text)
    links = [attributes["href"] for tag, attributes in elements.tags if tag == "a"]
    targets = {f"#{attributes['id']}" for tag, attributes in elements.tags if "id" in attributes}
    assert set(links) == targets
    assert len(targets) == len(VERBS)
    sections = text.split("<section")[1:]
    assert all("<table>" in section and "<dt>command</dt>" in section for section in sections)
    assert [re.search(r"(\w+)\.json", section)[1] for section in sections] == list(VERBS)
    titles = re.findall("<h2>(.*)</h2>", text)
    assert (titles[0], titles[1], titles[-2], len(set(titles))) == (
        "Devices and software", "Preflight", "Context-parallel attention", len(VERBS))  # fmt: skip
    assert sum(tag == "img" for tag, _ in elements.tags) == 5
    assert "None" not in text
    assert "nan" not in [cell for row in elements.rows for cell in row]


@pytest.mark.parametrize("row", [
    ["all_gather", "FAIL", "4.70", "GB/s", "Slow: device 1."],
    ["all_reduce", "float32", "4", "1", "data", "87.0", "82.0", "92.0", "5.40", "3.60", "–", "473,646", "4,262,818"],
    ["all_reduce", "data", "128", "7", "2,000", "14.0"],
    ["all_reduce", "float32", "2", "1", "data", "128", *["82.0", "90.0", "3.00", "6.00"] * 2, "5.00", "0"],
    ["eth0", "1.23"],
    ["eth0", "up, 100,000 Mb/s"],
    ["mlx5_0/1", "Ethernet, ACTIVE"],
    ["librccl-net.so", "/usr/lib/librccl-net.so (not loaded)"],
    ["attention", "200", "66.7 %", "100", "–"],
    ["64 tokens", "2.00", "–", "–", "–"],
])  # fmt: skip
def test_values_are_shown_in_readable_units(row, page):
    assert row in Page(page.read_text()).rows


def test_numbers_have_three_digits():
    assert [number(x) for x in (0, 0.000012345, 0.5, 99.96, 1234.5, None)] == [
        "0", "1.23e-05", "0.500", "100", "1,234", "–"]  # fmt: skip
    assert number(2.5e9, 1e9) == "2.50"


def test_what_failed_is_shown_first(page):
    start = page.read_text().split("<nav")[0]
    notes = re.findall(r'<p class="note (\w+)"><strong>\w+:</strong> <a href="#result-\d+">([^<]*)</a>(.*)</p>', start)
    assert ("failed", "Preflight", ": Checks that fail: all_gather.") in notes
    assert ("failed", "Matrix products", ", attention 64 tokens: Out of memory.") in notes


def test_the_page_loads_nothing(page):
    tags = Page(page.read_text()).tags
    loaded = [attributes["src"] for _, attributes in tags if "src" in attributes]
    assert all(source.startswith("data:image/png;base64,") for source in loaded)
    assert not {"script", "link", "iframe", "object"} & {tag for tag, _ in tags}
    assert "url(" not in page.read_text()
    assert all(attributes["alt"] for tag, attributes in tags if tag == "img")
    policy = next(attributes["content"] for _, attributes in tags if "http-equiv" in attributes)
    assert policy.startswith("default-src 'none'")


def test_text_of_results_is_escaped(results, tmp_path):
    evil = '<script>alert("&")</script>'
    described = results["describe"] | {"device": evil, "environment": {evil: evil}}
    checked = results["preflight"] | {"command": evil, "failed": evil}
    checked["checks"] = [Check(evil, evil, None, evil, evil)._asdict()]
    folder = write(tmp_path, {"describe": described, "preflight": checked, evil.replace("/", ""): {}})
    (tmp_path / "link.html").symlink_to("page.html")  # which stays one
    assert main(["report", str(folder), "--output", str(tmp_path / "link.html")]) == 0
    text = (tmp_path / "page.html").read_text()
    assert "<script" not in text
    assert text.count("&lt;script&gt;alert(") > 10


def test_results_with_nothing_to_plot_have_no_plot(results, tmp_path):
    gemm = results["gemm"] | {"maximum": 0.0, "results": [row for row in results["gemm"]["results"] if "failed" in row]}
    assert main(["report", str(write(tmp_path, {"gemm": gemm}))]) == 0
    text = (tmp_path / "report.html").read_text()
    assert "<img" not in text
    assert {"64 tokens"} <= {row[0] for row in Page(text).rows}


@pytest.mark.parametrize(("change", "said"), [
    ({}, False),
    ({"device": "4 × cpu"}, False),
    ({"device": "8 × AMD Instinct MI300X, simulated"}, False),
    ({"device": "8 × AMD Instinct MI300X"}, True),
    ({"cpus": 4096}, True),
])  # fmt: skip
def test_results_of_different_hardware_are_named(change, said, results, tmp_path):
    other = results["preflight"] | {"hardware": results["preflight"]["hardware"] | change}
    write(tmp_path, {"step": results["step"], "other": other})
    assert main(["report", str(tmp_path)]) == 0
    start = (tmp_path / "report.html").read_text().split("<nav")[0]
    assert ("These results are of different machines or devices" in start) is said
    assert ("(other.json)" in start) is said
    assert ("AMD Instinct MI300X" in re.search("<h1>(.*)</h1>", start)[1]) is (said and "device" in change)


def test_other_files_are_ignored_and_named(results, tmp_path, capsys):
    folder = write(tmp_path, {"step": results["step"], "breakdown": recorded("breakdown"), "rows": [1], "other": {
        "benchmark": ["memory bandwidth"]}})  # fmt: skip
    (folder / "rows.jsonl").write_text("{")
    assert main(["report", str(folder)]) == 0
    said = "Ignored, since the report has no section for them: breakdown.json, other.json, rows.json."
    assert said in capsys.readouterr().out
    assert said in (folder / "report.html").read_text()


@pytest.mark.parametrize(("files", "arguments", "message"), [
    ({}, [], "has no results. Each of these commands writes one: python -m zaya_jax.machine describe > "),
    ({"step.json": '{"benchmark": "coll'}, [], "step.json is not JSON: "),
    ({"step.json": '{"benchmark": "storage", "hardware": {}}'}, [],
     "step.json is a damaged result of machine storage, or one of another version (KeyError('command')): write it"),
    ({"sizing.json": '{"config": "a", "phases": [1]}'}, [], "sizing.json is a damaged result of machine sizing"),
    ({}, ["--output", "step.json"], "--output is 'step.json', but must end in .html."),
    ({}, ["--output", "no/such.html"], "--output is 'no/such.html', but must be a file in an existing folder."),
])  # fmt: skip
def test_bad_input_is_named_and_nothing_written(files, arguments, message, tmp_path, capsys):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert main(["report", str(tmp_path), *arguments]) == 2
    out, err = capsys.readouterr()
    assert err.startswith("Error: ")
    assert message in err
    assert (out, err.count("\n")) == ("", 1)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == files


def test_a_folder_that_does_not_exist_is_named(capsys):
    assert main(["report", "/no/such/folder"]) == 2
    assert "FOLDER is '/no/such/folder', but must be a folder with results" in capsys.readouterr().err


@pytest.mark.soak
@pytest.mark.parametrize("width", [420, 1200])
def test_a_browser_shows_every_plot_and_tables_scroll(width, page, tmp_path):
    # The page forbids scripts, so a copy without that policy reports on itself.
    probe = """<script>onload = () => document.body.dataset.probe = JSON.stringify({
      images: [...document.images].map(image => image.naturalWidth),
      width: document.documentElement.scrollWidth, window: innerWidth,
      letters: [...document.querySelectorAll("body *")].map(e => parseFloat(getComputedStyle(e).fontSize)),
    })</script></body>"""
    text, count = re.subn(r"<meta http-equiv[^>]*>", "", page.read_text())
    assert count == 1
    copy = tmp_path / "copy.html"
    copy.write_text(text.replace("</body>", probe))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
             "--disable-background-networking", "--disable-component-update", f"--user-data-dir={tmp_path / 'user'}",
             f"--window-size={width},900"]  # fmt: skip
    done = subprocess.run([CHROMIUM, *flags, "--dump-dom", copy.as_uri()], capture_output=True, text=True, timeout=120,
                          stdin=subprocess.DEVNULL, check=True)  # fmt: skip
    body = next(attributes for tag, attributes in Page(done.stdout).tags if tag == "body")
    seen = json.loads(body["data-probe"])
    assert len(seen["images"]) == 5
    assert all(size > 100 for size in seen["images"])
    assert seen["width"] <= seen["window"]
    assert min(seen["letters"]) >= 8 * 96 / 72  # 8 pt
