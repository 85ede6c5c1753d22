"""The exporter serves what the files of a run say, and survives whatever they contain."""

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.aegis.aegis_helpers import supervise_light
from tests.aegis.metrics_helpers import (
    NODE,
    ROOT,
    make_run,
    metrics_row,
    save_checkpoint,
    timings_row,
    write_node,
    write_rows,
)
from tests.browser_helpers import Page
from zaya_jax.aegis.__main__ import main
from zaya_jax.aegis.exporter import FAMILIES, RunReader
from zaya_jax.aegis.failure import FaultClass
from zaya_jax.aegis.goodput import BUCKETS
from zaya_jax.aegis.live_page import render_live
from zaya_jax.errors import ExitCode
from zaya_jax.run.metrics import read_last_row


@contextlib.contextmanager
def exporter(run_dir, *options):
    """An exporter in a process of its own; yields the function that scrapes it."""
    command = [sys.executable, "-m", "zaya_jax.aegis", "export", str(run_dir), "--port", "0", *options]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        url = process.stdout.readline().split()[-1]
        assert url.startswith("http://127.0.0.1:")

        def scrape(**headers):
            with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60) as response:  # noqa: S310 (loopback)
                text = response.read().decode()
            families = list(text_string_to_metric_families(text))
            return text, {(sample.name, *sorted(sample.labels.items())): sample.value
                          for family in families for sample in family.samples}  # fmt: skip

        scrape.address = ("127.0.0.1", int(url.split(":")[-1].split("/")[0]))
        yield scrape
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def serving(tmp_path_factory):
    with exporter(make_run(tmp_path_factory.mktemp("served") / "run")) as scrape:
        yield scrape


def test_a_scrape_says_what_the_run_does(tmp_path):
    run_dir = make_run(tmp_path / "run")
    node, other = ("node", NODE), ("node", "node-1")
    with exporter(run_dir) as scrape:
        text, values = scrape()
        expected = {
            ("zaya_step",): 20, ("zaya_tokens_seen",): 2000, ("zaya_loss",): 3.0, ("zaya_grad_norm",): 0.5,
            ("zaya_learning_rate",): 0.02, ("zaya_skipped_steps",): 0, ("zaya_router_entropy",): 0.8,
            ("zaya_router_entropy_min",): 0.7, ("zaya_expert_load_max",): 2.5, ("zaya_balancing_bias_range",): 0.25,
            ("zaya_step_seconds",): 0.5, ("zaya_data_wait_seconds",): 0.1, ("zaya_tokens_per_second",): 180,
            ("zaya_flops_per_second",): 1e12, ("zaya_mfu",): 0.25, ("zaya_checkpoint_step",): 20,
            ("zaya_job_nodes", ("state", "rank")): 1, ("zaya_job_nodes", ("state", "spare")): 1,
            ("zaya_job_nodes", ("state", "lost")): 1,
            ("zaya_up", node): 1, ("zaya_up", other): 0, ("zaya_attempt", node): 2,
            ("zaya_supervisor_exit_code", other): 93,
            ("zaya_process_step", node, ("process", "1")): 20,
            ("zaya_process_phase", node, ("phase", "device_wait"), ("process", "1")): 1,
            ("zaya_restarts_total", node): 1,
            ("zaya_faults_total", ("fault", "gpu"), node): 1, ("zaya_faults_total", ("fault", "crash"), node): 0,
        }  # fmt: skip
        assert {key: values.get(key) for key in expected} == pytest.approx(expected)
        assert ("zaya_supervisor_exit_code", node) not in values
        assert 60 <= values["zaya_checkpoint_age_seconds",] < 90
        assert 0 <= values["zaya_telemetry_age_seconds",] < 30
        assert values["zaya_goodput_fraction", node] == 0
        assert len([key for key in values if key[0] == "zaya_goodput_seconds"]) == 2 * len(BUCKETS)
        assert len([key for key in values if key[0] == "zaya_faults_total"]) == 2 * len(FaultClass)
        assert not [value for key, value in values.items() if key[0] == "zaya_exporter_read_errors_total" and value]
        assert {key[0] for key in values} == set(FAMILIES)
        assert str(tmp_path) not in text

        write_rows(run_dir, 21, loss=float("nan"), load_entropy=[float("nan"), 0.5], skipped=1, mfu=None)
        _, values = scrape()
        assert values["zaya_step",] == 21
        assert values["zaya_skipped_steps",] == 1
        assert values["zaya_router_entropy",] == 0.5
        assert ("zaya_loss",) not in values
        assert ("zaya_mfu",) not in values


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:80", "LocalHost:1", "[::1]:9464", "10.1.2.3"])
def test_requests_may_name_an_address(serving, host):
    assert "zaya_exporter_read_errors_total" in serving(Host=host)[0]


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:9464", "127.0.0.1.evil.example", "localhost.evil.example", "1.2.3", "",
     "127.0.0.1,evil.example", "[::1]evil", "evil@127.0.0.1"],
)  # fmt: skip
def test_a_page_whose_name_leads_to_the_exporter_reads_nothing(serving, host):
    with pytest.raises(urllib.error.HTTPError, match="421: Misdirected Request") as refused:
        serving(Host=host)
    assert b"zaya_" not in refused.value.read()
    refused.value.close()


def test_the_page_shows_the_job_its_processes_and_faults_and_loads_nothing(serving, tmp_path):
    url = f"http://127.0.0.1:{serving.address[1]}/"
    with urllib.request.urlopen(url, timeout=60) as response:
        assert (response.headers["Refresh"], response.headers["Content-Type"]) == ("2", "text/html; charset=utf-8")
        page = Page(text := response.read().decode())
    assert page.headings == ["Last step", "Processes", "Faults", "Newest events"]
    rows = page.rows
    assert ["20", "3.00", "0.500", "0.500", "180"] in rows
    assert [NODE, "1", "device_wait", "20", "3.00", "0"] in rows
    assert [NODE, "gpu", "gpu-lost", "0", "7", "–", "–"] in [row[1:8] for row in rows]
    assert "spare    node-2: ready, has the checkpoint of step 20" in text
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in page.tags}
    with pytest.raises(urllib.error.HTTPError, match="421"):
        urllib.request.urlopen(urllib.request.Request(url, headers={"Host": "evil.example"}), timeout=60)


def test_the_page_shows_what_it_can_read_of_a_damaged_or_hostile_run(tmp_path):
    empty = render_live(tmp_path)
    assert empty.count("could not be read") == 2  # rows and events
    run_dir = make_run(tmp_path / "<b>run</b>")
    write_node(run_dir, "node-9<script>", why="<img src=x>")
    (run_dir / "metrics.jsonl").write_bytes(b"\xff" * 100)
    (run_dir / "aegis" / "state.json").write_text('{"nodes": 3}')
    page = Page(text := render_live(run_dir))
    assert "node-9&lt;script&gt;" in text
    assert not {"script", "b", "img"} & {tag for tag, _ in page.tags}
    assert "Processes" in page.headings


def test_slow_connections_keep_nobody_out(serving):
    held = [socket.create_connection(serving.address, timeout=20) for _ in range(80)]
    for connection in held:
        connection.sendall(b"GET / HT")  # and nothing more
    assert "zaya_exporter_read_errors_total" in serving()[0]
    ended = 0
    for connection in held[:40]:
        ended += connection.recv(10) == b""
        connection.close()
    assert ended == 40  # so that no more than 40 others are open
    for connection in held:
        connection.close()


def test_a_run_that_has_not_started_has_no_values(tmp_path):
    assert {sample.name for sample in RunReader(tmp_path).read()} == {"zaya_exporter_read_errors_total"}


@pytest.mark.parametrize(
    ("name", "content", "source"),
    [
        ("metrics.jsonl", b'{"step": 3}\n\xff\xfe{{{\n{"step": 4, "loss', None),
        ("metrics.jsonl", b"[" * 100_000, None),
        ("metrics.jsonl", b'{"step": 1, "load_entropy": 3}\n', "rows"),
        ("metrics.jsonl", None, "rows"),
        ("checkpoints/9/manifest-x.json", b"not JSON", None),
        (f"aegis/{NODE}/state.json", b"[]", "state"),
        (f"aegis/{NODE}/state.json", b'{"state": "running", "unix": 9e99, "ranks": [{"phase": "/"}]}', "state"),
        (f"aegis/{NODE}/events.jsonl", b'{"v": 1, "id": 1, "attempt": 1, "unix": 0}\n', None),
        (f"aegis/{NODE}/events.jsonl", b"\0" * 1000, None),
    ],
)
def test_damage_costs_the_samples_of_one_file_at_most(tmp_path, name, content, source):
    run_dir = make_run(tmp_path / "run")
    (run_dir / name).parent.mkdir(parents=True, exist_ok=True)
    (run_dir / name).unlink(missing_ok=True)
    if content is None:
        os.mkfifo(run_dir / name)  # opening it would wait for a writer
    else:
        (run_dir / name).write_bytes(content)
    reader = RunReader(run_dir)
    for scrape in (1, 2):
        samples = reader.read()
        errors = {sample.labels["source"]: sample.value for sample in samples if sample.name.endswith("errors_total")}
        assert {key: count for key, count in errors.items() if count} == ({} if source is None else {source: scrape})
        names = {sample.name for sample in samples}
        assert {"zaya_checkpoint_step", "zaya_up", "zaya_restarts_total"} <= names
        assert "'/'" not in str(samples)


def test_only_the_end_of_a_large_file_is_read(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with path.open("wb") as file:
        file.truncate(2**33)  # sparse
        file.seek(2**33)
        file.write(b'\n{"step": 7}\n{"step": 8')
    assert read_last_row(path) == {"step": 7}


def test_the_number_of_series_is_bounded(tmp_path):
    write_node(tmp_path, ranks=[{"rank": rank, "phase": "data"} for rank in range(5000)])
    assert len(RunReader(tmp_path).read()) < 1100


def test_a_supervisor_that_was_killed_is_down(tmp_path):
    write_node(tmp_path, unix=time.time() - 11)
    samples = {sample.name: sample.value for sample in RunReader(tmp_path).read()}
    assert samples["zaya_up"] == 0
    assert not {"zaya_process_phase", "zaya_process_step", "zaya_supervisor_exit_code"} & set(samples)


def test_the_goodput_of_an_attempt_that_runs_is_known(tmp_path):
    supervised = supervise_light(tmp_path, 100_000)
    try:
        deadline = time.monotonic() + 20
        fraction = 0.0
        while fraction == 0:
            assert time.monotonic() < deadline
            time.sleep(0.1)
            samples = RunReader(supervised.run_dir).read()
            fraction = next((each.value for each in samples if each.name == "zaya_goodput_fraction"), 0.0)
        buckets = {each.labels["bucket"]: each.value for each in samples if each.name == "zaya_goodput_seconds"}
    finally:
        supervised.process.terminate()
        supervised.wait()
    assert 0.1 < fraction < 1
    assert buckets["productive"] / sum(buckets.values()) == pytest.approx(fraction)
    assert all(seconds >= 0 for seconds in buckets.values()), buckets
    assert {("zaya_up", 1), ("zaya_attempt", 1)} <= {(each.name, each.value) for each in samples}


def test_the_age_of_a_checkpoint_does_not_change_when_it_is_verified(tmp_path):
    save_checkpoint(tmp_path, 5, age=1000.0)
    (tmp_path / "checkpoints" / "5" / "VERIFIED").touch()
    (age,) = [each.value for each in RunReader(tmp_path).read() if each.name == "zaya_checkpoint_age_seconds"]
    assert 1000 <= age < 1030


def test_the_columns_are_those_that_the_documentation_of_a_run_names():
    documented = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    for column in (*metrics_row(1), *timings_row(1)):
        assert f"`{column}`" in documented, column


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["missing"], "missing is not a folder."),
        ([".", "--port", "70000"], "--port is 70000, but must be from 0 to 65535."),
        ([".", "--port", "0", "--address", "203.0.113.1"], "Metrics cannot be served at 203.0.113.1:0: "),
    ],
)
def test_bad_input_is_named(tmp_path, monkeypatch, capsys, options, words):
    monkeypatch.chdir(tmp_path)
    assert main(["export", *options]) == ExitCode.BAD_INPUT
    assert words in capsys.readouterr().err


def test_a_missing_library_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.delitem(sys.modules, "zaya_jax.aegis.exporter")
    assert main(["export", str(tmp_path)]) == ExitCode.BAD_INPUT
    assert capsys.readouterr().err.count("pip install 'zaya-jax[aegis]'") == 1
