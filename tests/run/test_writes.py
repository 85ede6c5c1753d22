"""Every write and delete of product and benchmarks, and why those outside of `run/writing.py` can harm nobody."""

import ast
from collections import Counter
from pathlib import Path

import pytest

import zaya_jax

ROOT = Path(zaya_jax.__file__).parent
PACKAGES = (ROOT, *(ROOT.parent / name for name in ("pallas_kernels", "benchmarks")))
MODULE = "run/writing.py"
TEMPORARY = "in a temporary folder with a random name, which only this user may enter"
CHOSEN = "folders that must not exist, and a file that `run/writing.py` has opened"
MEMORY = "to memory, or to a file that `run/writing.py` has opened"

# File → the functions that write or delete, and the reason why others cannot turn them against this user.
OTHERS = {
    "aegis/drill.py": ("mkdir mkdir open", CHOSEN),
    "aegis/gpu_probe.py": ("fdopen dump", "a pipe"),
    "aegis/notify.py": ("fdopen", "an anonymous file in memory"),
    "aegis/processes.py": ("truncate", "of an anonymous file in memory"),
    "aegis/training_command.py": ("TemporaryFile", "a file without a name"),
    "benchmarks/ablations.py": ("TemporaryDirectory", TEMPORARY),
    "benchmarks/benchmark_command.py": ("TemporaryFile", TEMPORARY),
    "benchmarks/checkpoint.py": ("TemporaryDirectory dump mkdir mkdir open open rename rmtree rmtree "
                                 "save_checkpointables_async unlink write_text", TEMPORARY),
    "benchmarks/data.py": ("TemporaryDirectory TemporaryDirectory open tofile write_bytes", TEMPORARY),
    "benchmarks/data_peers.py": ("TemporaryDirectory", TEMPORARY),
    "benchmarks/gpu_report/determinism.py": ("TemporaryDirectory mkdir", TEMPORARY),
    "benchmarks/gpu_report/runs.py": ("TemporaryDirectory", TEMPORARY),
    "benchmarks/gpu_report/training.py": ("TemporaryDirectory write_text", TEMPORARY),
    "benchmarks/gpu_report/state.py": ("write_text", TEMPORARY),
    "benchmarks/gpu_report/supervisor.py": ("mkdir write_text", TEMPORARY),
    "benchmarks/gpu_report/speed.py": ("TemporaryDirectory TemporaryDirectory", TEMPORARY),
    "benchmarks/startup.py": ("TemporaryDirectory fdopen truncate", TEMPORARY),
    "aegis/copies.py": ("mkdir open replace unlink", "copies named by content, in a private folder"),
    "checkpoint/local.py": ("mkdir replace tofile", "in a new folder of a private folder"),
    "checkpoint/orbax_save.py": ("save_checkpointables_async",
                                 "into folders that must not exist and that Orbax creates"),
    "checkpoint/store.py": ("mkdir rmdir", "creates a folder that must not exist, and removes it while it is empty"),
    "checkpoint/writer.py": ("open", "tensorstore, in a new folder"),
    "data/loading/source_rows.py": ("savez", MEMORY),
    "data/prepare/shard_conversion.py": ("save", MEMORY),
    "data/prepare/shards.py": ("ArrayRecordWriter", MEMORY),
    "data/prepare/workers.py": ("ftruncate mmap", "an anonymous file in memory"),
    "lab/measure/step_parts.py": ("TemporaryDirectory TemporaryDirectory", TEMPORARY),
    "lab/predict/compilers/compiled.py": ("TemporaryDirectory write_text", TEMPORARY),
    "lab/predict/compilers/toolchain.py": ("mkdir mkdir rename write_text", TEMPORARY),
    "lab/predict/compilers/stand_ins.py": ("TemporaryDirectory mkdir rename unlink write_text write_text",
                                       "in a private folder"),
    "lab/compile_worker.py": ("write_text write_text", TEMPORARY),
    "lab/measure/storage.py": ("TemporaryDirectory open unlink", TEMPORARY),
    "benchmarks/train_step.py": ("TemporaryDirectory", TEMPORARY),
    "model/tree.py": ("replace", "no file: a variable of the model"),
    "job/relay.py": ("TemporaryDirectory", TEMPORARY),
    "run/command_output.py": ("open open open", "/dev/null, and the streams that this process was started with"),
    "run/files.py": ("open fchmod", MEMORY),
    "run/folder.py": ("rmdir", "of the run folder that this process created, while it is empty"),
    "run/job_secret.py": ("rmdir", "of the folders that this process created, while they are empty"),
    "run/local_copies.py": ("rmdir", "of folders that earlier versions made, while they are empty"),
    "run/metrics.py": ("ftruncate open truncate", MEMORY),
    "run/figures.py": ("savefig", MEMORY),
    "run/progress_record.py": ("mmap mmap open", "memory, or the file in memory that the supervisor named"),
    "run/signals.py": ("open", "/dev/null"),
    "train/autotuning.py": ("TemporaryDirectory TemporaryDirectory write_text", TEMPORARY),
    "train/profiler.py": ("start_trace start_trace", "jax, into a folder that was just created"),
    "train/sinks/tensorboard.py": ("EventsWriter", "a file whose name has the nanosecond"),
    "train/sinks/wandb.py": ("init", "W&B, into folders whose names it makes"),
}  # fmt: skip

NAMES = """
    ArrayRecordWriter EventsWriter FileIO NamedTemporaryFile ParquetWriter SpooledTemporaryFile SummaryWriter
    TemporaryDirectory TemporaryFile chmod chown copyfile copyfileobj copymode copystat copytree dump fchmod fchown
    ftruncate hardlink_to lchown link make_archive makedirs memmap mkdir mkdtemp mkfifo mknod mkstemp mmap move
    mv removedirs removexattr renames rmdir rmtree save save_checkpointables save_checkpointables_async save_file
    save_pretrained savefig savetxt savez savez_compressed setxattr start_trace symlink symlink_to to_csv to_file
    to_parquet tofile touch truncate unlink unpack_archive utime write_bytes write_image write_table write_text
"""
OF_MODULES = {"os": ("remove", "rename", "replace", "open"), "shutil": ("copy", "copy2"), "sqlite3": ("connect",),
              "wandb": ("init",), "np": ("open_memmap",), "writing": ()}  # fmt: skip
WRITING = {"O_APPEND", "O_CREAT", "O_RDWR", "O_TMPFILE", "O_TRUNC", "O_WRONLY"}


def writes(source: str) -> Counter[str]:
    """The functions that write or delete files, by their names, for each call of one."""
    return Counter(filter(None, (_write(node) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))))


def _write(call: ast.Call) -> str | None:
    function = call.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    owner = ast.unparse(function.value) if isinstance(function, ast.Attribute) else ""
    arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
    strings = [each.value for each in arguments if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    if name == "open" and owner == "os":
        return name if WRITING & {each.attr for each in ast.walk(call) if isinstance(each, ast.Attribute)} else None
    if name in ("open", "fdopen"):
        is_mode = any(set(text) <= set("rwxabt+") and set(text) & set("wxa+") for text in strings)
        return name if is_mode or any(keyword.arg == "create" for keyword in call.keywords) else None
    if name == "memmap":
        return None if "r" in strings else name
    if name == "save" and owner not in ("np", "numpy", "jnp"):  # a method of this project, which is listed itself
        return None
    if name == "dump" and owner == "yaml":
        return None  # to text
    if name == "replace" and owner not in ("dataclasses", "os"):  # of a path has one argument, of a text two
        return name if len(call.args) == 1 and not call.keywords else None
    if name == "rename" and owner != "writing":
        return name if owner else None
    return name if name in NAMES.split() or name in OF_MODULES.get(owner, ()) else None


@pytest.fixture(scope="module")
def found():
    """File → the functions in it that write or delete."""
    files = ((path.relative_to(ROOT if package == ROOT else ROOT.parent).as_posix(), path)
             for package in PACKAGES for path in package.rglob("*.py"))  # fmt: skip
    return {name: calls for name, path in files if (calls := writes(path.read_text())) and name != MODULE}


def test_every_write_and_delete_goes_through_one_module_or_is_listed_with_its_reason(found):
    listed = {name: Counter(calls.split()) for name, (calls, _) in OTHERS.items()}
    assert found == listed


@pytest.mark.parametrize("code", [
    "path.open('w')", "open(path, 'ab')", "open(path, mode='r+')", "os.open(path, os.O_RDWR)", "path.write_text(x)",
    "os.replace(a, b)", "a.replace(b)", "a.rename(b)", "os.rename(a, b)", "os.remove(a)", "shutil.rmtree(a)",
    "path.unlink()", "shutil.copy(a, b)", "tempfile.mkstemp()", "np.save(path, x)", "sqlite3.connect(path)",
    "np.memmap(path, mode='w+')", "path.symlink_to(x)", "tensorstore.open(spec, create=True)", "gzip.open(path, 'wb')",
    "rmtree(a)", "x.tofile(path)", "path.touch()", "os.makedirs(a)", "yield path.chmod(0o777)",
])  # fmt: skip
def test_a_write_is_recognized(code):
    assert sum(writes(code).values()) == 1


@pytest.mark.parametrize("code", [
    "path.open()", "open(path, 'rb')", "os.open(path, os.O_RDONLY)", "text.replace('a', 'b')", "names.remove(x)",
    "dataclasses.replace(x, a=1)", "yaml.dump(x)", "np.memmap(path, np.uint8, 'r')", "json.dumps(x)",
])  # fmt: skip
def test_what_only_reads_is_not_a_write(code):
    assert not writes(code)
