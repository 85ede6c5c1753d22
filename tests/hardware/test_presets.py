"""Presets: what they contain, and how they are applied and described beside what a person has set."""

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.users_helpers import TEAM, needs_root
from zaya_jax.config import load_config
from zaya_jax.hardware.detection import cpu_digest
from zaya_jax.hardware.environment import APPLIED, apply_preset, describe_preset, keep_compilations, step_options
from zaya_jax.hardware.presets import PRESETS

ROOT = Path(__file__).parent.parent.parent
GPUS = [name for name in PRESETS if name != "cpu"]
MANUAL = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", PRESETS)
def test_an_empty_environment_gets_all_of_a_preset(name):
    preset, environment = PRESETS[name], {}
    for _ in range(2):  # the second time changes nothing
        apply_preset(preset, environment)
    flags = [setting.text for setting in preset.settings if setting.is_flag]
    assert environment.pop("XLA_FLAGS", "") == " ".join(flags)
    assert environment.pop(APPLIED) == name
    assert environment == {setting.name: setting.value for setting in preset.settings if not setting.is_flag}


@given(st.sampled_from(GPUS), st.data())
def test_what_is_set_already_stands(name, data):
    preset = PRESETS[name]
    before = data.draw(st.lists(st.sampled_from(preset.settings), unique=True))
    flags = ["--xla_dump_to=x", *(f"{s.name}=mine" for s in before if s.is_flag), "--xla_gpu_enable_command_buffer_x="]
    environment = {s.alias or s.name: "mine" for s in before if not s.is_flag} | {"XLA_FLAGS": " ".join(flags)}
    given_environment = dict(environment)
    apply_preset(preset, environment)

    assert {name: environment[name] for name in given_environment if name != "XLA_FLAGS"} == {
        name: value for name, value in given_environment.items() if name != "XLA_FLAGS"
    }
    assert environment["XLA_FLAGS"].split()[: len(flags)] == flags
    own = [setting for setting in preset.settings if setting not in before]
    assert environment["XLA_FLAGS"].split()[len(flags) :] == [s.text for s in own if s.is_flag]
    assert all(environment[s.name] == s.value for s in own if not s.is_flag)
    assert not any(s.name in environment for s in before if s.alias), "both names of a variable are one too many"

    line = describe_preset(environment)
    assert line is not None
    assert "\n" not in line
    ours, _, yours = line.removeprefix(f"Preset {name}: ").partition("; set otherwise: ")
    assert ours == (" ".join(s.text for s in own) or "nothing set")
    assert set(yours.split()) == {f"{setting.alias or setting.name}=mine" for setting in before}


def test_flags_that_xla_reads_from_a_file_are_left_alone():
    environment = {"XLA_FLAGS": "flags.txt"}
    apply_preset(PRESETS["h100"], environment)
    assert environment["XLA_FLAGS"] == "flags.txt"
    line = describe_preset(environment)
    assert line is not None
    missing = [setting.name for setting in PRESETS["h100"].settings if setting.is_flag]
    assert line.endswith(f"; not set: {' '.join(missing)}")


def test_the_line_is_of_what_the_environment_has_now():
    environment: dict[str, str] = {}
    assert describe_preset(environment) is None
    apply_preset(PRESETS["cpu"], environment)
    assert describe_preset(environment) == "Preset cpu: nothing set"
    apply_preset(PRESETS["h200"], environment)
    del environment["CUDA_DEVICE_MAX_CONNECTIONS"]
    assert str(describe_preset(environment)).endswith("; not set: CUDA_DEVICE_MAX_CONNECTIONS")


def test_compilations_are_kept_in_the_cache_of_the_person(tmp_path):
    expected = str(tmp_path / "zaya_jax" / f"xla-{cpu_digest()}")
    for variables in ({"XDG_CACHE_HOME": str(tmp_path)}, {"HOME": str(tmp_path.parent), "XDG_CACHE_HOME": ""}):
        environment = dict(variables)
        keep_compilations(environment)
        folder = environment.pop("JAX_COMPILATION_CACHE_DIR")
        assert environment == variables
        assert (folder == expected) == (variables["XDG_CACHE_HOME"] != "")
        assert Path(folder).parent.name == "zaya_jax"
    for folder in ("mine", ""):
        environment = {"HOME": str(tmp_path), "JAX_COMPILATION_CACHE_DIR": folder}
        keep_compilations(environment)
        assert environment["JAX_COMPILATION_CACHE_DIR"] == folder
    (tmp_path / "file").touch()
    environment = {"XDG_CACHE_HOME": str(tmp_path / "file")}  # like a home of another user
    keep_compilations(environment)
    assert "JAX_COMPILATION_CACHE_DIR" not in environment
    environment = {}  # a process without a home
    keep_compilations(environment)
    assert environment == {}


def test_folders_made_for_compiled_code_cannot_be_replaced_by_the_group(tmp_path):
    """It is used by its name later, so nobody else may rename a folder on the way."""
    mask = os.umask(0o002)
    try:
        keep_compilations({"HOME": str(tmp_path)})
    finally:
        os.umask(mask)
    for folder in (tmp_path / ".cache", tmp_path / ".cache" / "zaya_jax"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@needs_root
@pytest.mark.parametrize(("group", "mode", "kept"), [
    (TEAM, 0o755, True), (TEAM, 0o775, False), (0, 0o775, True), (0, 0o777, False), (TEAM, 0o1777, True),
])  # fmt: skip
def test_compiled_code_is_not_kept_where_others_can_replace_its_folder(tmp_path, capsys, group, mode, kept):
    (tmp_path / ".cache").mkdir()
    os.chown(tmp_path / ".cache", -1, group)
    (tmp_path / ".cache").chmod(mode)
    environment = {"HOME": str(tmp_path)}
    keep_compilations(environment)
    assert ("JAX_COMPILATION_CACHE_DIR" in environment) == kept
    assert (f"chmod go-w {tmp_path / '.cache'}" in capsys.readouterr().err) != kept


def test_jax_knows_every_flag():
    """Unknown flags end a process. XLA has one table for all platforms, so a CPU can tell."""
    flags = {setting.text for preset in PRESETS.values()
             for setting in (*preset.settings, *preset.fsdp, *preset.one_micro_batch) if setting.is_flag}  # fmt: skip
    assert len(flags) >= 6

    def started(*flags: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags)}
        start = "from jaxlib import xla_client; xla_client.make_cpu_client()"
        return subprocess.run([sys.executable, "-c", start], env=environment, text=True, capture_output=True,
                              timeout=120, check=False)  # fmt: skip

    assert started(*sorted(flags)).returncode == 0
    assert "Unknown flag" in started("--xla_gpu_no_such_flag=true").stderr


@pytest.mark.parametrize(("layout", "flags"), [
    ({"fsdp": True}, {"xla_gpu_enable_pipelined_all_gather", "xla_gpu_enable_while_loop_double_buffering"}),
    ({"one_micro_batch": True}, {"xla_gpu_enable_pipelined_all_gather"}),
    ({}, set()),
    ({"deterministic": True}, {"xla_gpu_exclude_nondeterministic_ops"}),
])  # fmt: skip
def test_a_step_gets_the_flags_of_its_layout_unless_they_are_set(layout, flags):
    needs = {name for name in flags if "deterministic" in name}  # whatever the machine

    def options():
        return step_options(**layout, environment=environment)

    environment: dict[str, str] = {}
    assert options() == dict.fromkeys(needs, True), "no preset is applied"
    apply_preset(PRESETS["h200"], environment)
    assert options() == dict.fromkeys(flags, True)
    environment["XLA_FLAGS"] += " --xla_gpu_enable_pipelined_all_gather=false --xla_gpu_exclude_nondeterministic_ops"
    assert options() == {name: True for name in flags if "double" in name}
    environment["XLA_FLAGS"] = "flags.txt"
    assert options() == dict.fromkeys(needs, True)


def test_what_is_traced_has_no_command_buffers_unless_the_flag_is_set():
    assert step_options(traced=True, environment={}) == {"xla_gpu_enable_command_buffer": ""}
    assert step_options(traced=True, environment={"XLA_FLAGS": "--xla_gpu_enable_command_buffer=FUSION"}) == {}


def test_the_run_waits_longer_than_the_network_retries():
    for name in GPUS:
        exponent = next(int(setting.value) for setting in PRESETS[name].settings if setting.name == "NCCL_IB_TIMEOUT")
        retries = 7 * 4.096e-6 * 2**exponent
        assert 100 < retries < PRESETS[name].peer_timeout < PRESETS[name].join_seconds


def test_the_manual_lists_every_setting():
    rows = re.findall(
        r"^\| `([A-Za-z_-]+)=(\S*)` \| ([^|]+) \| ([^|]+) \| \[\w[\w-]*\]\(([^)]+)\) \|$", MANUAL, re.MULTILINE
    )
    assert all(source.startswith("https://") for *_, source in rows)
    listed = {(name, value, reason, source): who for name, value, who, reason, source in rows}
    settings: dict[tuple[str, ...], list[str]] = {}
    for preset in PRESETS.values():
        for setting in preset.settings:
            settings.setdefault(setting[:4], []).append(preset.name)
    assert listed == {setting: "all GPUs" if names == GPUS else ", ".join(names) for setting, names in settings.items()}
    steps = {setting for preset in PRESETS.values() for setting in (*preset.fsdp, *preset.one_micro_batch)}
    for setting in steps:
        (row,) = (line for line in MANUAL.splitlines() if line.startswith(f"| `{setting.text}` |"))
        assert setting.reason in row
        assert setting.source in row
        fsdp = [preset.name for preset in PRESETS.values() if setting in preset.fsdp]
        assert row.split(" | ")[1] == ("all GPUs" if fsdp == GPUS else ", ".join(fsdp))
    for name, key in (("waits for the coordinator", "join_seconds"), ("may go unheard", "peer_timeout")):
        (row,) = (line for line in MANUAL.splitlines() if line.startswith("|") and name in line)
        assert re.findall(r"(\d+) s", row) == [str(getattr(PRESETS[p], key)) for p in ("cpu", "mi300x")]


def test_the_trainer_applies_it_before_jax_is_imported_says_so_and_keeps_compilations(tmp_path):
    """In a process of its own, since here jax is imported; the run itself is replaced by its first line."""
    code = f"""
import sys
from zaya_jax.config import load_config
from zaya_jax.job.jax_setup import prepare_jax

prepare_jax(load_config({str(ROOT / "configs" / "tiny.yaml")!r}, ["preset=mi355x"]))
sys.modules["jax"].jit(lambda x: x + 1)(1)
from zaya_jax.train.sinks.console import ConsoleReport

ConsoleReport(load_config({str(ROOT / "configs" / "tiny.yaml")!r}), None, "gfx950").start()
prepare_jax(load_config({str(ROOT / "configs" / "tiny.yaml")!r}, ["preset=h100"]))  # too late, and so left
import os
assert os.environ["ZAYA_PRESET"] == "mi355x"
"""
    left_out = "XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR", APPLIED
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    environment |= {"NCCL_IB_TIMEOUT": "23", "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, text=True, cwd=ROOT, capture_output=True,
                          timeout=120, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    expected: dict[str, str] = {"NCCL_IB_TIMEOUT": "23"}
    apply_preset(PRESETS["mi355x"], expected)
    assert done.stdout == f"{describe_preset(expected)}\n"
    assert "; set otherwise: NCCL_IB_TIMEOUT=23" in done.stdout
    assert list((tmp_path / "zaya_jax").glob("xla-*/jit__lambda*"))


def test_a_program_of_ones_own_is_told_that_there_is_none(capsys, monkeypatch):
    from zaya_jax.train.sinks.console import ConsoleReport

    monkeypatch.delenv(APPLIED, raising=False)
    for kind, said in (
        ("gfx942", "Preset: none, because jax was imported before zaya_jax could set it\n"),
        ("cpu", ""),
    ):
        ConsoleReport(load_config(ROOT / "configs" / "tiny.yaml"), None, kind).start()
        assert capsys.readouterr().out == said
