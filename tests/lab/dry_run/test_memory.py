"""Bytes of the state against arrays that are there, and of activations against a table worked by hand."""

import dataclasses
import functools
import re
from pathlib import Path

import jax
import pytest

from tests.lab.helpers import empty_state
from tests.train_helpers import make_program, on_devices
from zaya_jax.config import load_config
from zaya_jax.lab.predict.dry_run import memory as module
from zaya_jax.lab.predict.dry_run.estimate import TARGET, simulated_programs
from zaya_jax.lab.predict.dry_run.memory import Activations, Memory, estimate_memory
from zaya_jax.ops.registry import select_kernels
from zaya_jax.parallel.placement import device_bytes
from zaya_jax.train.program import Programs

TINY = load_config("configs/tiny.yaml")
KERNELS = select_kernels(TARGET, TINY.model, TINY.train.compute_dtype)
DOC = Path(__file__).parents[3] / "docs/parallel.md"
LAYOUTS = {
    "data": [],
    "mixed": ["parallel.fsdp=2", "parallel.expert=2", "parallel.context=2"],
}
PLAIN = ["train.compute_dtype=bfloat16", "model.attention=gqa", "model.router=linear"]
NARROW = ["model.vocab_size=512", "model.hidden_size=64"]  # arrays that are there take time to make


def memory(config, devices=1, sequences=1, micro_batches=2, count=module.count_activations):
    """Of a device in the first phase."""
    config = dataclasses.replace(config, phases=config.phases[:1])  # another phase may be of other devices
    return estimate_memory(
        simulated_programs(config, devices)[0], sequences, config.context_for(config.phases[0]), micro_batches, count
    )


def allocated(layouts):
    """Bytes of the master weights, and of the rest of a state, on the second of eight devices that really hold it."""
    sizes, config = {}, load_config("configs/tiny.yaml", NARROW)
    state = empty_state(make_program(config))
    for name, overrides in layouts.items():
        config = load_config("configs/tiny.yaml", [*NARROW, *overrides])
        placed = jax.device_put(state, make_program(config, 8).placement.shardings(state))
        master_weights = held(placed.params)
        sizes[name] = master_weights, held(placed) - master_weights
    return sizes


def held(tree):
    device, total = jax.devices()[1], 0
    for x in jax.tree.leaves(tree):
        array = jax.random.key_data(x) if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        total += sum(shard.data.nbytes for shard in array.addressable_shards if shard.device == device)
    return total


def test_the_state_takes_what_real_arrays_take():
    there = on_devices(8, "tests.lab.dry_run.test_memory:allocated", LAYOUTS)
    for name, overrides in LAYOUTS.items():
        config = load_config("configs/tiny.yaml", [*NARROW, *overrides])
        state = Programs(config, KERNELS, 8)[0].abstract_state
        params = device_bytes(state.params)
        assert (params, device_bytes(state) - params) == there[name], name


def hand_table(remat):
    """Bytes of the rows that follow `remat`'s heading in the document, from their shapes and as written."""
    rows = DOC.read_text(encoding="utf-8").split(f"<!-- kept with {remat}: begin -->")[1].split("<!-- end -->")[0]
    pattern = r"\| `\[([\d, ]+)\]` (fp32|bf16|int32|bool) \| (?:(\d+) × )?(\d+) \| ([\d,]+) \|"
    worked = written = 0
    for shape, dtype, count, layers, size in re.findall(pattern, rows):
        elements = 1
        for length in shape.split(","):
            elements *= int(length)
        worked += elements * {"fp32": 4, "bf16": 2, "int32": 4, "bool": 1}[dtype] * int(count or 1) * int(layers)
        written += int(size.replace(",", ""))
    return worked, written


def kept(config, *shape):
    """Bytes of activations."""
    return memory(config, *shape, count=count_kept).activations


def count_kept(*shape):
    """Leave out those that are recomputed, which take longer to count."""
    return Activations(module.residual_bytes(*shape), 0)


@pytest.mark.parametrize("remat", ["full", "none"])
def test_activations_of_the_released_model_are_those_of_the_table(remat):
    worked, written = hand_table(remat)
    assert worked == written > 0
    config = load_config("configs/zaya1_8b.yaml", [f"phases.0.remat={remat}"])
    counted = kept(config)
    assert counted == pytest.approx(worked, rel=0.05)
    said = float(re.search(rf"With `{remat}` .*?, ([\d.]+) % ", DOC.read_text(encoding="utf-8"), re.DOTALL)[1])
    assert abs(counted / worked - 1) * 100 == pytest.approx(said, abs=0.011)


def test_policies_keep_less_in_their_order():
    configs = (load_config("configs/tiny.yaml", [*PLAIN, f"train.remat={remat}"]) for remat in ("full", "dots", "none"))
    sizes = [kept(config) for config in configs]
    assert sizes == sorted(set(sizes))


def test_activations_grow_with_sequences_and_shrink_with_context():
    config = load_config("configs/tiny.yaml", PLAIN)
    one, two = (kept(config, 1, sequences) for sequences in (1, 2))
    halved = load_config("configs/tiny.yaml", [*PLAIN, "parallel.context=2"])
    shared = kept(halved, 2)
    assert shared / 2 < one < two  # twice: those of the last micro-batch as well


def test_the_highest_is_in_the_backward_pass_or_in_the_update():
    held = Memory(parameters=1, optimizer=2, compute=4, gradients=8, activations=16, temporaries=32, update=64)
    assert held.total == 1 + 2 + 64
    assert held._replace(update=59).total == 1 + 2 + 60


def test_gradients_summed_each_micro_batch_take_the_masters_part(monkeypatch):
    monkeypatch.setattr(module, "residual_bytes", lambda *_: 0)  # which takes seconds to count
    kept = {}
    for reduce in ("step", "micro_batch"):
        config = load_config("configs/tiny.yaml", [f"parallel.gradient_reduction={reduce}"])
        kept[reduce] = memory(config, 8)
    program = Programs(TINY, KERNELS, 8)[0]
    params, leaves = program.abstract_state.params, program.placement.leaves
    shards = {name: device_bytes(x) for name, x in params.items()}
    # The layers reduce the gradients of their matrices.
    of_micro_batch = sum(shards[name] if leaves[name].reduced_in_layers else 4 * x.size for name, x in params.items())
    assert kept["micro_batch"].gradients == of_micro_batch + sum(shards.values())
    assert kept["micro_batch"].gradients < 0.5 * kept["step"].gradients


def test_layers_of_a_single_micro_batch_gather_their_experts(monkeypatch):
    monkeypatch.setattr(module, "residual_bytes", lambda *_: 0)
    config, program = TINY, Programs(TINY, KERNELS, 8)[0]
    experts = sum(device_bytes(x) for name, x in program.abstract_state.params.items()
                  if program.placement.leaves[name].gathered_in_layers)  # fmt: skip
    with_remat = dataclasses.replace(config, train=dataclasses.replace(config.train, remat="full"))
    kept = [memory(with_remat, 8, micro_batches=count) for count in (1, 2)]
    assert kept[1].compute - kept[0].compute == 7 * experts  # in fp32, as the master weights
    assert kept[0].gradients < 0.5 * kept[1].gradients


LORA = ["lora.rank=16", "lora.alpha=32"]


@functools.cache
def under_adapters():
    """On one device."""
    config = load_config("configs/finetune.yaml", LORA)
    return memory(config)


def test_under_adapters_parameters_are_stored_once_in_the_compute_dtype():
    config, adapted = load_config("configs/finetune.yaml"), under_adapters()
    d, f, layers, experts, rank = 2048, 2048, 40, 16, 16
    pairs = [(d, 1024), (d, 256), (d, 128), (d, 128), (1024, d), *[(d, 2 * f), (f, d)] * experts]
    adapters = layers * rank * sum(rows + columns for rows, columns in pairs)
    assert adapted.parameters == adapted.update == 4 * adapters
    assert adapted.gradients == 4 * adapters
    assert 0 <= adapted.optimizer - 8 * adapters < 1e5  # both moments; balancing, counters
    assert adapted.compute == 0
    vectors = 4 * layers * 13000  # fp32 norms, scales and biases of a layer
    assert 0 < adapted.frozen - 2 * 8_840_488_784 < vectors
    assert adapted.total < 26e9 < memory(config, count=count_kept).total / 5


def test_eight_devices_share_what_is_under_adapters(monkeypatch):
    config, alone = load_config("configs/finetune.yaml", [*LORA, "parallel.fsdp=8"]), under_adapters()
    monkeypatch.setattr(module, "residual_bytes", lambda *_: 0)  # which takes seconds to count
    shared = memory(config, 8)
    assert shared.frozen == pytest.approx(alone.frozen / 8, rel=0.01)
    assert shared.parameters == pytest.approx(alone.parameters / 8, rel=0.01)
    # A layer is gathered where it begins: experts as they lie, other matrices from a copy in the order of the gather.
    # The embedding is there whole.
    embedding = 2 * config.model.vocab_size * 2048
    assert embedding < shared.compute < embedding + 0.05 * alone.frozen / 8
