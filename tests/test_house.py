"""The house rules that a machine can check: floors, file sizes, tests for each room, nothing of one machine."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "zaya_jax"
MODULES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))
LONGEST = 400


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL, check=False
    )


GROUND = ["zaya_jax", "zaya_jax.errors", *(
    f"zaya_jax.{'.'.join(module.with_suffix('').parts)}" for module in MODULES
    if module.parts[0] in ("config", "hardware", "run") and module.name != "__init__.py"
)]  # fmt: skip


@pytest.mark.parametrize("names", ["zaya_jax", ", ".join(GROUND)])
def test_importing_the_ground_floor_leaves_jax_and_numpy_unimported(names: str):
    heavy = "{'jax', 'jaxlib', 'numpy', 'flax', 'optax', 'orbax', 'grain'}"
    done = run(sys.executable, "-c", f"import sys, {names}; print(sorted({heavy} & set(sys.modules)))")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_import_contracts_hold():
    code = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    done = run(sys.executable, "-c", code)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_room_has_tests():
    rooms = {module.parts[0] for module in MODULES if len(module.parts) > 1}
    assert "config" in rooms
    missing = [room for room in sorted(rooms) if not list((ROOT / "tests" / room).rglob("test_*.py"))]
    assert not missing, f"These folders of tests are missing: {', '.join(missing)}."


def test_no_file_is_too_long_to_hold_one_idea():
    lengths = {str(path): len((PACKAGE / path).read_text(encoding="utf-8").splitlines()) for path in MODULES}
    long = {path: lines for path, lines in lengths.items() if lines > LONGEST}
    assert not long, f"Split these, {LONGEST} lines are the most: {long}."


def test_two_files_know_the_backend_of_the_kernels():
    backend = re.compile(r"jax\.experimental\.pallas(\.triton| import .*\btriton\b)")
    paths = [path for folder in ("pallas_kernels", "zaya_jax", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    users = [str(path.relative_to(ROOT)) for path in paths if backend.search(path.read_text(encoding="utf-8"))]
    assert sorted(users) == ["pallas_kernels/cca_mix_step.py", "pallas_kernels/launch.py"]


def project_files() -> list[Path]:
    """Files that are tracked, or would be with the next `git add`; without git, all but hidden ones."""
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    if listed.returncode == 0:
        paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    else:
        paths = [p for p in ROOT.rglob("*") if not any(part.startswith(".") for part in p.relative_to(ROOT).parts)]
    return [path for path in paths if path.is_file()]


# Written so that they do not find themselves.
OF_ONE_MACHINE = re.compile(
    r"""(extra-)?index[-]url | find[-]links | trusted[-]host | /[r]oot/ | /[t]mp/w\b | /[w]ork/main | /[w]ork/shared
      | pypi[.]org | pythonhosted[.]org | download[.]pytorch[.]org""",
    re.VERBOSE,
)


def test_the_pattern_finds_what_it_looks_for():
    for text in ("--index" + "-url x", "/ro" + "ot/.cache", "/tm" + "p/w/v311", "https://py" + "pi.org/simple"):
        assert OF_ONE_MACHINE.search(text), text
    for text in ("the root/leaf", "/tmp/work", "a framework/", "tests/root"):
        assert not OF_ONE_MACHINE.search(text), text


def test_no_file_names_a_machine_path_or_a_registry():
    named = []
    for path in project_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # plots and arrays
        named += [
            f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}"
            for number, line in enumerate(text.splitlines(), 1)
            if OF_ONE_MACHINE.search(line)
        ]
    assert not named, "\n".join(named)
