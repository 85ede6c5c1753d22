import json
import re
import subprocess
import sys

import pytest

from tests.train_helpers import ROOT
from zaya_jax.config import load_config
from zaya_jax.config.hardware import HARDWARE
from zaya_jax.dry_run.account import account_of
from zaya_jax.dry_run.report import dry_run
from zaya_jax.errors import InputError

SMALL = ["train.batch.tokens=8192", "train.batch.micro=1", "data.context=64"]
SMALL += ["model.num_layers=2", "model.vocab_size=512"]
DOC = ROOT / "docs/parallel.md"


def command(*arguments, overrides=()):
    return subprocess.run(
        [sys.executable, "-m", "zaya_jax.main", "--config", "configs/tiny.yaml", *SMALL, *overrides, "--dry-run",
         *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def test_the_command_says_what_each_phase_takes():
    done = command("--devices", "8", "--hardware", "mi300x")
    assert (done.returncode, done.stderr) == (0, "")
    heading, table = done.stdout.split("\n\n")
    assert heading.startswith("8 devices, mi300x: 192 GB, 1307 TFLOP/s")
    assert "not from what was compiled" in heading
    account = account_of(load_config(ROOT / "configs/tiny.yaml", SMALL), 0, 8, HARDWARE["mi300x"])
    assert table.startswith("Phase train: data 8; 8,192 tokens a step, of which a device works through 16 × 1 ")
    for name, size in account.memory._asdict().items():
        assert re.search(rf"^    {name} +{size / 1e9:.2f} GB$", table, re.MULTILINE), name
    for one in account.transfers:
        assert f"    {one.what}, {one.kind} over data: {one.bytes / 1e9:.3f} GB" in table
    assert "It fits, with 19" in table


def test_json_has_the_account_and_the_proof():
    config = load_config(ROOT / "configs/tiny.yaml", SMALL)
    found = json.loads(dry_run(config, 8, as_json=True))
    assert (found["devices"], found["hardware"]) == (8, None)
    (phase,) = found["phases"]
    account = account_of(config, 0, 8, None)
    assert phase["memory"] == {**account.memory._asdict(), "total": account.memory.total}
    assert phase["flops"] == account.flops
    assert len(phase["transfers"]) == len(account.transfers)
    assert phase["compiled"]["seconds"] > 0
    assert 1e8 < phase["compiled"]["host_bytes"] < 8e9


@pytest.mark.parametrize(
    ("arguments", "overrides", "said"),
    [
        (["--devices", "0"], [], "--devices"),
        (["--devices", "8", "--hardware", "b200"], [], "--hardware is 'b200', but must be one of mi300x, "),
        (["--devices", "8"], ["parallel.fsdp=3"], "which does not divide the 8 devices of this job."),
    ],
)
def test_bad_input_is_one_sentence(arguments, overrides, said):
    done = command(*arguments, overrides=overrides)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("Error: ")
    assert done.stderr.endswith(".\n")
    assert done.stderr.count("\n") == 1
    assert said in done.stderr


def test_no_devices_is_bad_input_from_python_too():
    with pytest.raises(InputError, match=r"^--devices is 0, but must be at least 1\.$"):
        dry_run(load_config(ROOT / "configs/tiny.yaml", SMALL), 0)


def test_the_document_says_whether_a_fine_tune_fits():
    text = DOC.read_text(encoding="utf-8")
    phases = re.search(r"'(phases=\[\{name: finetune.*?\])'", text)[1]
    config = load_config(ROOT / "configs/zaya1_8b.yaml", [phases])
    rows = re.findall(r"\| (\d) × (h200|mi300x), reduce (step|micro_batch) \| ([\d.]+) GB \| (yes|no) \|", text)
    assert len(rows) >= 4
    for devices, name, reduce, size, answer in rows:
        one = load_config(ROOT / "configs/zaya1_8b.yaml", [phases, f"parallel.reduce={reduce}"])
        total = account_of(one, 0, int(devices), HARDWARE[name]).memory.total
        assert f"{total / 1e9:.1f}" == size
        assert (total <= HARDWARE[name].memory) == (answer == "yes")
    block = text.split("<!-- output: begin -->")[1].split("<!-- output: end -->")[0]
    account = account_of(config, 0, 1, HARDWARE["h200"])
    assert re.search(rf"highest +{account.memory.total / 1e9:.2f} GB of 141", block)
    assert f"{account.step_seconds:.2f} s a step" in block
