import contextlib
import functools
import io
import json
import re

import pytest

from tests.train_helpers import ROOT
from zaya_jax.config import load_config
from zaya_jax.hardware.data_sheets import HARDWARE
from zaya_jax.lab.predict.dry_run import dry_run_report as report
from zaya_jax.lab.predict.dry_run.estimate import estimate_phase, simulated_programs
from zaya_jax.main import main
from zaya_jax.run.table import size_text

SMALL = ["train.batch.tokens=8192", "train.batch.micro_batch=1", "data.context=64"]
SMALL += ["model.num_layers=2", "model.vocab_size=512", "model.attention=gqa", "model.router=linear"]
PROOF = {"proof": "compiled", "seconds": 1.5, "host_bytes": 2e9}
DOC = ROOT / "docs/parallel.md"


def arguments(*more, overrides=()):
    return ["--config", "configs/tiny.yaml", *SMALL, *overrides, "--dry-run", *more]


@pytest.fixture(scope="module")
def printed():
    """What the command says as JSON, with a proof that is made up."""
    proven = []
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as said:
        patch.chdir(ROOT)
        patch.setattr(report, "prove", lambda *asked: proven.append(asked) or PROOF)
        assert main(arguments("--devices", "8", "--json")) == 0
        assert proven == [(load_config("configs/tiny.yaml", SMALL), 0, 8)]
    return json.loads(said.getvalue())


@functools.cache
def estimate():
    return estimate_phase(simulated_programs(load_config(ROOT / "configs/tiny.yaml", SMALL), 8), 0, HARDWARE["mi300x"])


def test_the_command_says_what_each_phase_takes(printed, monkeypatch, capsys):
    (phase,) = printed["phases"]
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(report, "prove", lambda *_: phase["compiled"])
    asked = []
    monkeypatch.setattr(report, "estimate_phase", lambda *arguments: asked.append(arguments[1:]) or estimate())
    assert main(arguments("--devices", "8", "--hardware", "mi300x", overrides=["ops.attention=cudnn"])) == 0
    assert asked == [(0, HARDWARE["mi300x"])]
    heading, summary, table = capsys.readouterr().out.split("\n\n")
    assert re.match(r"Times are ranges, since no mi300x .*\n8 devices, mi300x: 206 GB .* 1307 TFLOP/s", heading)
    assert "estimated from shapes" in heading
    total = f"{estimate().memory.total / 1e9:.1f} of 199.9 GB"
    speed = f"{1e3 * estimate().step_seconds:.2f} to {1e3 * estimate().most_seconds:.2f} ms/step"
    assert summary.startswith(f"Phase train: fits, {total} per device that XLA may allocate\n  {speed}")
    assert re.search(r"; estimated: (\d+% [a-z ]+(, )?){3}$", summary, re.MULTILINE)
    assert summary.endswith("Estimates are those of the default kernels in place of ops.attention=cudnn.")
    assert main(arguments("--devices", "8", overrides=["ops.attention=palas"])) == 2
    assert "ops.attention is 'palas', but must be one of" in capsys.readouterr().err
    assert "layout: data 8; remat" in table
    assert "step: 8,192 tokens; per device 16 × micro_batch 1\n" in table
    stored = phase["storage"]
    assert [row["stored_over"] for row in stored if row["replicated_over"] != ["data"]] == [["data"]]
    for row in stored:
        over = ["none", "all 8 devices"] if row["replicated_over"] else ["all 8 devices", "none"]
        (line,) = re.findall(rf"^  {over[0]} +{over[1]} +(.*)", table, re.MULTILINE)
        assert line == f"{size_text(row['bytes'])}  {row['gathered']}"
        assert all(name in table for name in row["parameters"])
    assert "compiled for this layout in 1.5 s, with 2.0 GB of this machine's memory" in table
    assert 1e6 <= estimate().memory.total < 1e9
    for name, size in estimate().memory._asdict().items():
        assert re.search(rf"^    {name} +{size / 1e6:.2f} MB$", table, re.MULTILINE), name
    for transfer in estimate().transfers:
        assert f"    {transfer.what}, {transfer.kind} over data: {transfer.bytes / 1e6:.3f} MB" in table


@pytest.mark.parametrize(("largest", "unit"), [(3e15, (1e12, "TB")), (1e12, (1e12, "TB")), (9e11, (1e9, "GB")),
                                               (2e6, (1e6, "MB")), (999, (1, "B"))])  # fmt: skip
def test_a_table_has_the_unit_of_its_largest_value(largest, unit):
    assert report._unit(largest, "B") == unit


def test_without_hardware_the_summary_is_the_memory(printed):
    phase = report._Phase(estimate(), printed["phases"][0]["compiled"])
    (line,) = report._answer(phase, None)
    assert re.fullmatch(r"Phase train: \d+\.\d MB per device", line)


def test_a_phase_that_does_not_fit_says_so_first(printed):
    device = HARDWARE["mi300x"]._replace(memory=1e6)
    phase = report._Phase(estimate(), printed["phases"][0]["compiled"])
    first, _, last = report._answer(phase, device)
    assert re.fullmatch(r"Phase train: DOES NOT FIT, .* of 0.0 GB per device that XLA may allocate", first)
    assert re.fullmatch(r"  try: .*more devices", last)


def test_durations_have_the_unit_that_suits_them():
    assert [report._duration(x) for x in (5, 121, 7200, 3 * 86400)] == ["5 s", "2.0 minutes", "2.0 hours", "3.0 days"]


def test_json_has_the_estimate_and_the_proof(printed):
    assert (printed["devices"], printed["hardware"]) == (8, None)
    (phase,) = printed["phases"]
    assert phase["memory"] == {**estimate().memory._asdict(), "total": estimate().memory.total}
    assert phase["flops"] == estimate().flops
    assert len(phase["transfers"]) == len(estimate().transfers)
    assert phase["compiled"] == PROOF


@pytest.mark.parametrize(
    ("more", "overrides", "said"),
    [
        (["--devices", "0"], [], "--devices"),
        (["--devices", "8", "--hardware", "b200"], [], "--hardware is 'b200', but must be one of mi300x, "),
        (["--devices", "8"], ["parallel.fsdp=3"], "parallel.fsdp 3 "),
        (["--devices", "8", "--compile-for", "b200"], [], "--compile-for is 'b200', but must be one of h100, "),
        (["--devices", "8", "--suggest"], [], "--suggest needs --hardware NAME or --compile-for GPU"),
        (["--devices", "12", "--compile-for", "h200"], [], "--devices is 12, but must be at most 8 or a multiple of 8"),
        (["--devices", "8", "--compile-for", "h200", "--hardware", "h100"], [], "--hardware is h100, but must be h200"),
        (["--devices", "8", "--compile-for", "h200"], [], "pip install 'zaya-jax[compile-cuda]'"),
        (["--devices", "8", "--compile-for", "mi355x"], [], "pip install 'zaya-jax[compile-rocm]'"),
    ],
)
def test_bad_input_is_one_sentence(more, overrides, said, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert main(arguments(*more, overrides=overrides)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("Error: ")
    assert err.endswith(".\n")
    assert err.count("\n") == 1
    assert said in err


def test_the_document_says_whether_a_fine_tune_fits():
    text = DOC.read_text(encoding="utf-8")
    phases = re.search(r"'(phases=\[\{name: finetune.*?\])'", text)[1]
    rows = re.findall(r"\| (\d) × (h200|mi300x), reduce (step|micro_batch) \| ([\d.]+) GB \| (yes|no) \|", text)
    assert len(rows) >= 4

    @functools.cache
    def on(devices, reduce):
        config = load_config(ROOT / "configs/zaya1_8b.yaml", [phases, f"parallel.gradient_reduction={reduce}"])
        return estimate_phase(simulated_programs(config, int(devices)), 0, HARDWARE["h200"])

    assert load_config(ROOT / "configs/zaya1_8b.yaml", [phases]).parallel.gradient_reduction == "step"
    for devices, name, reduce, size, answer in rows:
        total = on(devices, reduce).memory.total
        assert f"{total / 1e9:.1f}" == size
        assert (total <= HARDWARE[name].allocatable) == (answer == "yes")


FINETUNE = (ROOT / "docs/finetune.md").read_text(encoding="utf-8")
WHOLE, ADAPTERS = [], ["lora.rank=16", "lora.alpha=32"]


@pytest.mark.parametrize(
    ("column", "devices", "overrides"),
    [
        pytest.param(0, 1, WHOLE, marks=pytest.mark.soak),
        pytest.param(1, 8, [*WHOLE, "parallel.fsdp=8"], marks=pytest.mark.soak),
        (2, 1, ADAPTERS),
        pytest.param(3, 8, [*ADAPTERS, "parallel.fsdp=8"], marks=pytest.mark.soak),
    ],
)
def test_the_memory_that_the_manual_shows_is_what_the_command_prints(column, devices, overrides):
    config = load_config(ROOT / "configs/finetune.yaml", overrides)
    memory = estimate_phase(simulated_programs(config, devices), 0, HARDWARE["h200"]).memory
    expected = {name: value / 1e9 for name, value in {**memory._asdict(), "peak": memory.total}.items()}
    rows = re.findall(r"^\| `(\w+)` \| ([\d. |]+) \|$", FINETUNE, re.MULTILINE)
    shown = {name: float(cells.split(" | ")[column]) for name, cells in rows}
    # Two decimals are shown; versions of jax differ a little in what they keep.
    assert shown == pytest.approx(expected, abs=0.02, rel=0.005)


def test_the_document_shows_the_steps_that_were_compiled():
    results = json.loads((ROOT / "benchmarks/compiled_steps.json").read_text(encoding="utf-8"))["results"]
    pattern = r"^\| (\w+), (\d+) \| (\w+) \| ([\d.]+) \| ([\d.]+) (m?s) \| (\d+) \|"
    rows = re.findall(pattern, DOC.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(rows) == len(results) == 12
    for (model, devices, gpu, size, step, unit, launches), result in zip(rows, results, strict=True):
        assert (model, int(devices), gpu) == (result["model"], result["devices"], result["gpu"])
        assert float(size) == pytest.approx(result["peak_bytes"] / 1e9, rel=0.005)
        assert float(step) * (1e-3 if unit == "ms" else 1) == pytest.approx(result["predicted_seconds"], rel=0.005)
        layers = 2 if model == "74B" else 1  # of a group
        layers *= 2 if gpu in ("h100", "h200") and model != "tiny" else 1  # loops are double-buffered with FSDP
        counts = result["launches"]
        assert int(launches) == round((counts["layers forward"] + counts["layers backward"]) / layers)
