"""Time the implementations of each operation on this machine's device, and write a table that training reads.

Candidates are XLA's reference, and each kernel with its declared tiles, chosen one by one with the best of the others.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from zaya_jax.config import Config, load_config
from zaya_jax.config.shipped import shipped
from zaya_jax.config.stages import largest_stage
from zaya_jax.errors import InputError
from zaya_jax.hardware.data_sheets import find_hardware
from zaya_jax.lab.kernel_cases import SMALL, Case, Sizes, cases, drawn, experts_of_a_step, passes
from zaya_jax.lab.measure.timing import Queue, time_calls
from zaya_jax.lab.predict.calibration import as_row
from zaya_jax.lab.predict.compilers.hlo import parse
from zaya_jax.lab.predict.compilers.predict import launched
from zaya_jax.lab.predict.dry_run.estimate import simulated_programs
from zaya_jax.lab.result import describe_run, print_tables
from zaya_jax.ops import kernel_table
from zaya_jax.ops.kernel_table import REFERENCE, Choice, own_table, read_choice, size_key, sources_digest, tiles_of
from zaya_jax.ops.registry import OPERATIONS, KernelSelection, check_kernel, select_kernels, widths
from zaya_jax.ops.target import Target, current_target
from zaya_jax.parallel.mesh import batch_shards
from zaya_jax.run.files import json_text, read_object, write_atomically
from zaya_jax.run.table import Table, number
from zaya_jax.run.writing import make_folder

GAIN = 0.98  # of the time of the best tile so far, which another one must not exceed to replace it
# Cases that decide, the costliest first, with the value of `Sizes` that is their rows; backward ones run forward, too.
DECIDING: dict[str, dict[str, Callable[[Sizes], int]]] = {
    "experts": {"experts of a step": lambda sizes: sizes.per_expert},
    "cca_mix_step": {"cca_mix of a decode": lambda _: 32},
    "router_step": {"router of a decode": lambda _: 32},
    "cca_mix": {"cca_mix backward": lambda sizes: sizes.tokens},
    "residual_norm": {"residual_norm backward": lambda sizes: sizes.tokens},
    "attention": {"attention backward": lambda sizes: sizes.sequence, "attention of a decode": lambda _: 1},
    "gram_polynomial": {"gram_polynomial": lambda sizes: sizes.matrices[1]},
    "grouped_product": {"grouped_matmul": lambda sizes: sizes.per_expert},
    "grouped_product_transposed": {"grouped_matmul backward": lambda sizes: sizes.per_expert},
    "grouped_outer": {"grouped_matmul backward": lambda sizes: sizes.per_expert},
}


def tune(
    source: str | None,
    overrides: Sequence[str],
    repeats: int,
    seconds: float = math.inf,
    only: Collection[str] = DECIDING.keys(),
) -> dict[str, Any]:
    """Time all candidates at the local sizes of a configuration's phases; write and return the user's own table.

    On a CPU, kernels are emulated at a small size, which shows that everything runs. Without a `source`, the
    configuration is configs/bench_8b.yaml. After `seconds`, no further operation of `only` is timed. InputError if the
    configuration cannot run on as many devices as there are, or no candidate ran.
    """
    start = time.monotonic()
    config, target = load_config(source or shipped("bench_8b.yaml"), overrides), current_target()
    emulated = target.platform == "cpu"
    if emulated:
        print("JAX found no GPU. Kernels run emulated at a small size; do not compare these times with a GPU.")
        target = Target("interpret", target.device_kind)
    dtype = config.train.compute_dtype
    result = describe_run("kernels --tune", f"{source or 'configs/bench_8b.yaml'}, {dtype}", "XLA", ())
    result |= {"date": time.strftime("%Y-%m-%d", time.gmtime()), "device": target.device_kind, "operations": {}}
    path = own_table(target.device_kind)
    make_folder(path.parent)
    for sizes in [SMALL] if emulated else local_sizes(config):
        selection = select_kernels(target, sizes.model, dtype)
        for name in (name for name in DECIDING if name in only):
            if time.monotonic() > start + seconds:
                print(f"{name} is not timed: the limit of {seconds:.0f} s is over.")
                continue
            digest = sources_digest(*OPERATIONS[name].modules)
            row = result["operations"].setdefault(name, {"sources": digest, "sizes": []})
            known, every, timed = {*map(size_key, row["sizes"])}, deciding_cases(sizes, dtype), []
            for case, rows in DECIDING[name].items():
                if (dtype, rows(sizes), widths(OPERATIONS[name], sizes.model, dtype)) not in known:  # by another phase
                    timed += _tune(selection, name, every[case], rows(sizes), sizes, dtype, repeats)
            if timed:
                row["sizes"] += timed
                selection = with_choice(selection, name, read_choice(timed[0]))
                print_tables([_table(name, timed)])
                _write(path, result)
    if not any(row["sizes"] for row in result["operations"].values()):
        raise InputError("Nothing could be timed. The lines above say why.")
    print(f"Wrote {path}, which training on this machine reads from now on.")
    return result


def _write(path: Path, result: Mapping[str, Any]) -> None:
    """Write the table after each operation, so that an interruption loses one."""
    before = {}
    try:
        if path.exists():
            before = kernel_table.parse_table(read_object(path), result["device"], str(path)).content["operations"]
    except InputError as error:
        print(f"Replaced: {error}")
    write_atomically(path, json_text({**result, "operations": kernel_table.merged(before, result["operations"])}))


def deciding_cases(sizes: Sizes, dtype: str) -> dict[str, Case]:
    """Return the cases of `DECIDING`, and others, by name."""
    return cases(sizes, dtype) | {"experts of a step": experts_of_a_step(sizes, dtype)}


def local_sizes(config: Config) -> list[Sizes]:
    """Return the sizes of the phases of a configuration on one of this machine's devices, each once."""
    programs, model, found = simulated_programs(config, jax.device_count()), config.model, list[Sizes]()
    d, f, heads = model.hidden_size, model.expert_size, (model.num_query_heads, model.num_kv_heads, model.head_dim)
    for index in range(len(config.phases)):
        program, stage = programs[index], largest_stage(config, index)
        mesh = program.placement.mesh
        rows = program.batch_shape(stage)[1] // batch_shards(mesh)
        length, experts = stage.context // mesh.shape["context"], model.num_experts // mesh.shape["expert"]
        each, decoded = max(rows * length // experts, 1), (8, stage.context)
        widths = (d, *heads, model.router_size, experts, each, f, (experts, d, 2 * f), decoded)
        found.append(Sizes(rows * length, length, length, *widths))
    return list(dict.fromkeys(found))


def _tune(
    selection: KernelSelection, name: str, case: Case, rows: int, sizes: Sizes, dtype: str, repeats: int
) -> list[dict[str, Any]]:
    """Time the candidates of an operation; returns its size in the table, none if no candidate ran."""
    operation, target, times = OPERATIONS[name], selection.target, dict[str, dict[str, float]]()
    reasons = dict[str, str]()

    def seconds(choice: Choice) -> float:
        if choice.variant not in times:
            try:
                times[choice.variant] = time_case(case, with_choice(selection, name, choice), repeats)
            except Exception as error:  # of compiler or driver: the others remain
                times[choice.variant] = {}
                reasons[choice.variant] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return sum(times[choice.variant].values()) if times[choice.variant] else math.inf

    candidates = [Choice(rows, REFERENCE, dtype=dtype)]
    for kernel in operation.kernels_for(target.platform):
        if (name, kernel.name) in selection.reasons:
            reasons[kernel.name] = selection.reasons[name, kernel.name]
            continue
        declared = tiles_of(kernel, target, dtype)
        first = tuple(sorted((each, tiles[0]) for each, tiles in declared.items()))
        best = default = Choice(rows, kernel.name, first, dtype)
        for each, tiles in declared.items():
            for tile in tiles[1:]:
                limit = GAIN * seconds(best)  # the default tiles are timed first
                trial = best._replace(tiles=tuple(sorted((dict(best.tiles) | {each: tile}).items())))
                best = trial if seconds(trial) < limit else best
        candidates += dict.fromkeys((best, default))

    def is_right(choice: Choice) -> bool:
        if choice.kernel == REFERENCE:
            return True
        reason, _ = check_kernel(selection, name, choice, sizes.model, dtype, training=True, large=0)
        if reason:
            reasons[choice.variant] = reason
        return not reason

    choice = next(filter(is_right, sorted(candidates, key=seconds)))
    if not any(times.values()):
        print(f"{name} could not be timed: {next(iter(reasons.values()))}")
        return []
    tiles = {each: [list(tile.sizes), tile.warps, tile.stages] for each, tile in choice.tiles}
    row = {"dtype": dtype, "rows": rows, "widths": list(widths(operation, sizes.model, dtype))}
    row |= {"implementation": choice.kernel, "tiles": tiles, "seconds": times, "not_used": reasons}
    predicted = choice.kernel != REFERENCE and find_hardware(target.device_kind)
    return [row | {"works": case_works(case, with_choice(selection, name, choice))} if predicted else row]


def case_works(case: Case, kernels: KernelSelection) -> list[dict[str, Any]]:
    """Return the launches of a case's program, from which `lab.predict.calibration` divides its time."""
    run, arguments = passes(case, kernels)
    text = jax.jit(run, donate_argnums=tuple(range(case.held))).lower(*arguments).compile().as_text()
    return [as_row(part, work) | {"times": place.times} for place, _, part, work in launched(parse(text or ""))]


def time_case(case: Case, kernels: KernelSelection, repeats: int) -> dict[str, float]:
    """Return the median seconds of a case, a backward one with its forward pass, by what its integer arguments are."""
    run, arguments = passes(case, kernels)
    queue = Queue(run, drawn(arguments[: len(arguments) - len(case.integers)]), case.held)
    seconds = {}
    for name, integers in {"plain": case.integers, **case.further_integers}.items():
        one_pass = queue.make_pass(*map(jnp.asarray, integers))
        seconds[name] = float(f"{time_calls(one_pass, repeats, 0).median / one_pass():.4g}")
    return seconds


def with_choice(selection: KernelSelection, name: str, choice: Choice) -> KernelSelection:
    """Return the selection with an implementation of one operation."""
    if choice.kernel == REFERENCE:
        return selection.without([name])
    chosen, measured = {**selection.chosen, name: choice.kernel}, {**selection.measured, name: (choice,)}
    return dataclasses.replace(selection, chosen=chosen, measured=measured)


def totals(size: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds of each variant that ran, over all integer arguments."""
    return {variant: sum(seconds.values()) for variant, seconds in size["seconds"].items() if seconds}


def _table(name: str, sizes: Sequence[Mapping[str, Any]]) -> Table:
    rows = []
    for size in sizes:
        every, best = totals(size), dict[str, str]()
        for variant in sorted(every, key=every.__getitem__):
            best.setdefault(variant.partition(" ")[0], variant)
        xla = every.get(REFERENCE, math.nan)
        for kernel, variant in best.items():
            used = "yes" if kernel == size["implementation"] else ""
            times = [number(1e3 * every[variant]), number(xla / every[variant])]
            rows.append([f"{size['rows']:,}", variant, *times, used])
    return Table(name, ["rows", "implementation (tiles/warps/stages)", "ms", "× XLA", "runs"], rows)
