"""Stand-ins for the ROCm libraries, with which jax's ROCm plugin can be loaded to compile where ROCm is not installed.

No function of them does anything. Those called while the plugin is loaded return as if there were no GPU; every other
one prints its name and aborts the process, so what was compiled cannot have come from a stand-in. They live in a cache
folder of their own, which no search path contains, and only the process that compiles loads them, by path.
"""

import collections
import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from zaya_jax.errors import InputError
from zaya_jax.run.writing import private_folder

# Called while the plugin is loaded or unloaded.
_HARMLESS = {
    "__hipRegisterFatBinary": "static void *handle[64]; return (long)handle;",
    "__hipRegisterFunction": "return 0;",
    "__hipRegisterVar": "return 0;",
    "__hipUnregisterFatBinary": "return 0;",
    "rocprofiler_force_configure": "return 1;",
}
# Libraries by their functions' names, for those whose version does not say it; the first that matches counts.
_NAMED = ("rocblas", "rocsolver", "hipsolver", "hipsparse", "hipblas", "hipfft", "amd_comgr", "hiprtc")
_OWNERS = {
    "libamdhip64": r"(__)?hip[A-Z](?!.*fft)",
    "libMIOpen": "miopen",
    "libhipblaslt": r"hipblasLt|hipblaslt|_ZN?K?\d*.*hipblaslt",
    "librccl": "nccl|pncclx?",
    "librocm_smi64": "rsmi",
    "libamd_smi": "amdsmi",
    "librocprofiler-sdk": "rocprofiler",
    "librocprofiler-register": "rocprofiler_register",
    "libroctracer64": "roctracer",
    "libhsa-runtime64": "hsa_",
    **{f"lib{name}": name for name in _NAMED},
}
_SYSTEM = re.compile(r"(libm|librt|libpthread|libdl|libstdc\+\+|libc|ld-linux-x86-64|libgcc_s)\.so")
_PYTHON = re.compile(r"_?Py[A-Z_]|_ZT")
_ABORT = """#include <stdio.h>
#include <stdlib.h>
static long stop(const char *name) { fprintf(stderr, "%s is a stand-in: it only compiles\\n", name); abort(); }
"""


def load_stand_ins(plugin: Path) -> None:
    """Load the stand-ins for the libraries that `plugin` needs into this process, and build them if need be."""
    for library in sorted(_build(plugin).glob("*.so.*")):
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def check_tools() -> None:
    """Raise `InputError` if a program that builds the stand-ins is missing."""
    if missing := [tool for tool in ("gcc", "readelf") if shutil.which(tool) is None]:
        install = "Install gcc and binutils, for example with apt-get install gcc"
        raise InputError(f"Compiling for AMD GPUs needs {' and '.join(missing)}. {install}.")


def _build(plugin: Path) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zaya_jax" / "rocm_stand_ins"
    key = f"{plugin.resolve()} {plugin.stat().st_size} {Path(__file__).read_text(encoding='utf-8')}"
    folder = cache / hashlib.sha256(key.encode()).hexdigest()[:16]
    with private_folder(cache, by_name=True):  # code is run from it
        if folder.exists():
            return folder
        with tempfile.TemporaryDirectory(dir=cache) as temporary:
            made = Path(temporary) / "made"
            made.mkdir()
            needed, symbols, owners = _requirements(plugin)
            for library, functions in _assign(needed, symbols, owners).items():
                _compile(made / library, functions, [name for name, file in owners.items() if file == library])
            for source in (*made.glob("*.c"), *made.glob("*.map")):
                source.unlink()
            try:
                made.rename(folder)
            except OSError:  # another process was faster
                if not folder.is_dir():
                    raise
            return folder


def _readelf(plugin: Path, what: str) -> list[str]:
    command = ["readelf", "--wide", what, str(plugin)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()  # noqa: S603


def _requirements(plugin: Path) -> tuple[list[str], dict[str, str], dict[str, str]]:
    """Return the libraries, the functions with their versions, and the library of each version."""
    text = "\n".join(_readelf(plugin, "--dynamic"))
    needed = [name for name in re.findall(r"NEEDED.*\[(.*?)\]", text) if not _SYSTEM.match(name)]
    owners, file = dict[str, str](), ""
    for line in _readelf(plugin, "--version-info"):
        if match := re.search(r"File: (\S+)", line):
            file = match[1]
        if (match := re.search(r"Name: (\S+)", line)) and file:
            owners[match[1]] = file
    symbols = dict[str, str]()
    for line in _readelf(plugin, "--dyn-syms"):
        fields = line.split()
        if len(fields) < 8 or fields[6] != "UND" or fields[4] == "WEAK" or _PYTHON.match(fields[7]):
            continue
        name, _, version = fields[7].partition("@")
        version = version.strip("@")
        if not (version and _SYSTEM.match(owners.get(version, ""))):
            symbols[name] = version or symbols.get(name, "")
    return needed, symbols, owners


def _assign(needed: Iterable[str], symbols: Mapping[str, str], owners: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Return the functions of each library, with their versions."""
    functions: dict[str, dict[str, str]] = {library: {} for library in needed}
    for name, version in symbols.items():
        stems = (stem for stem, pattern in _OWNERS.items() if re.match(pattern, name))
        named = (library for stem in stems for library in functions if library.startswith(f"{stem}.so"))
        library = owners.get(version) or next(named, None)
        if library is not None:
            functions[library][name] = version
    return functions


def _compile(library: Path, functions: Mapping[str, str], versions: Iterable[str]) -> None:
    names = collections.defaultdict[str, list[str]](list)
    lines = [_ABORT]
    for index, (name, version) in enumerate(functions.items()):
        names[version].append(name)
        body = _HARMLESS.get(name, f'return stop("{name}");')
        lines.append(f'long f{index}(void) __asm__("{name}");\nlong f{index}(void) {{ {body} }}\n')
    source, script = library.with_name(f"{library.name}.c"), library.with_name(f"{library.name}.map")
    source.write_text("".join(lines), encoding="utf-8")
    command = ["gcc", "-shared", "-fPIC", "-w", "-o", str(library), str(source), f"-Wl,-soname,{library.name}"]
    nodes = [f"{version} {{ global: {'; '.join(some)}; }};" for version, some in sorted(names.items()) if version]
    nodes += [f"{version} {{ }};" for version in versions if version not in names]
    if nodes:
        script.write_text("\n".join(nodes), encoding="utf-8")
        command.append(f"-Wl,--version-script={script}")
    subprocess.run(command, check=True)  # noqa: S603
