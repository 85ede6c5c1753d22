"""The compilers of each vendor: find them among the installed packages, set their environment, and compile."""

import importlib.util
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from zaya_jax.errors import InputError
from zaya_jax.hardware.data_sheets import HARDWARE
from zaya_jax.hardware.environment import apply_preset
from zaya_jax.hardware.measurements import measured_preset
from zaya_jax.hardware.presets import PRESETS
from zaya_jax.lab.predict.compilers.gpus import GPUS, check_gpu, target_config
from zaya_jax.lab.predict.compilers.stand_ins import check_tools, load_stand_ins

_PLUGINS = {"cuda": "jax_plugins.xla_cuda12", "rocm": "jax_plugins.xla_rocm7"}
_NOT_INHERITED = ("XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR", "PJRT_NAMES_AND_LIBRARY_PATHS")
DUMP = "dump"  # folder of what XLA dumps
CODE_OBJECTS = "code_objects"  # folder of AMD's kernels, and of those for NVIDIA that XLA does not compile
# Autotuning would run candidates on a GPU. Triton products are chosen by autotuning only.
_FLAGS = "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"


def find_toolchain(name: str) -> tuple[Path, Path | None]:
    """Find the PJRT plugin for a GPU of `GPUS`, and NVIDIA's `ptxas`; InputError if something is missing."""
    check_gpu(name)
    platform = GPUS[name].platform
    assembler = _file("nvidia.cuda_nvcc", "bin/ptxas") if platform == "cuda" else None
    plugin = _file(_PLUGINS[platform], f"xla_{platform}_plugin.so")
    if plugin is None or (platform == "cuda" and assembler is None):
        install = f"Install them with pip install 'zaya-jax[compile-{platform}]'"
        raise InputError(f"--compile-for {name} needs packages that are not installed. {install}.")
    if platform == "rocm":
        check_tools()
    return plugin, assembler


def silence_plugins() -> None:
    """Drop jax's log of the traceback of a compiler's plugin that finds no GPU."""
    logging.getLogger("jax._src.xla_bridge").addFilter(lambda record: "Jax plugin" not in record.getMessage())


def environment(
    name: str, folder: Path, measurements: str | None = None, base: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return the environment of a process that compiles for a GPU into `folder`, with the flags of its preset."""
    plugin, assembler = find_toolchain(name)
    clean = {key: value for key, value in base.items() if key not in _NOT_INHERITED}
    flags = f"{_FLAGS} --xla_dump_to={folder / DUMP}"
    if assembler is not None:
        # The kernels in PTX, which jax 0.12 leaves out by default.
        flags += f" --xla_gpu_cuda_data_dir={assembler.parent.parent} --xla_dump_emitter_re=ptx"
    clean |= {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    clean |= {"PJRT_NAMES_AND_LIBRARY_PATHS": "" if assembler else f"rocm:{plugin}", "XLA_FLAGS": flags}
    clean |= {"MOSAIC_GPU_DUMP_PTXAS": "1", "MOSAIC_GPU_DUMP_TO": str(folder / CODE_OBJECTS)}
    clean["TF_XLA_HSACO_BITCODE_SIZE_THRESHOLD"] = "0"  # keeps the code objects of all kernels
    clean["TF_XLA_HSACO_CACHE_DIR"] = str(folder / CODE_OBJECTS)
    preset = PRESETS[name]
    apply_preset(preset if measurements is None else measured_preset(preset, measurements), clean)
    return clean


def _file(package: str, path: str) -> Path | None:
    """Return a file of an installed package; None if either is missing. Only parent packages are imported."""
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:
        return None
    places = [] if spec is None else spec.submodule_search_locations or []
    return next((file for place in places if (file := Path(place) / path).is_file()), None)


def program_files(folder: Path, name: str) -> tuple[Path, Path]:
    """Return the file of a program's HLO, and that of its code objects."""
    return folder / f"{name}.hlo", folder / name


def load_compiler(name: str) -> None:
    """Make the compiler for a GPU of `GPUS` usable in this process, which must have its `environment`."""
    plugin, _ = find_toolchain(name)
    silence_plugins()
    Path(os.environ["MOSAIC_GPU_DUMP_TO"]).mkdir(exist_ok=True)  # without it, Mosaic prints what it compiles
    if GPUS[name].platform == "rocm":
        load_stand_ins(plugin)


def gpu_devices(name: str, devices: int) -> Any:
    """Return devices that can be compiled for, but not run on."""
    node = min(devices, HARDWARE[name].node_size)
    shape = f"{devices // node}x1x{node}"  # NVLink domains or nodes × hosts of each × devices of each host
    platform = GPUS[name].platform
    return topologies.get_topology_desc(platform=platform, target_config=target_config(name), topology=shape).devices


def compile_traced(trace: Callable[[], Any], name: str, mesh: Any) -> Any:
    """Compile what `trace` returns for a GPU of `GPUS`, on a `mesh` of `gpu_devices`."""
    # From jax 0.12 on, the lowering of Triton kernels asks this mesh for the device.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return trace().lower(lowering_platforms=(GPUS[name].platform,)).compile()


def compile_program(
    name: str, traced: Callable[..., Any], arguments: Sequence[Any], gpu: str, folder: Path, donated: Sequence[int] = ()
) -> None:
    """Compile a function of arrays or shapes, by a unique name, for a loaded GPU; for `kernels.read_program`."""
    mesh = jax.sharding.Mesh(gpu_devices(gpu, 1), "device")
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tuple(arguments))

    def named(*arrays: Any) -> Any:
        return traced(*arrays)

    named.__name__ = name
    compiled = compile_traced(lambda: jax.jit(named, donate_argnums=donated).trace(*shapes), gpu, mesh)
    text, objects = program_files(folder, name)
    text.write_text(compiled.as_text(), encoding="utf-8")
    objects.mkdir()
    # Kernels of different programs can have the same name.
    for file in (folder / CODE_OBJECTS).glob("*"):
        file.rename(objects / file.name)
