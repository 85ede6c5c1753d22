"""No number of the schema may be so large, or so far from a number, that nothing can be computed with it."""

import dataclasses
import math
import typing

import pytest

from tests.config.test_schema import sections
from tests.config_helpers import SMALL, SOURCES, changed, refused
from zaya_jax.config import BatchConfig, BatchSizeConfig, Config, LoraConfig, ParallelConfig, ScheduleConfig, Table
from zaya_jax.config.bounds import LARGEST

PHASE = dataclasses.replace(
    SMALL.phases[0], name="mid", mixture=Table({"web": 1.0}), schedule=ScheduleConfig("wsd", decay_tokens=64),
    batch=BatchConfig(64, stepped=(BatchSizeConfig(64, 32),)), parallel=ParallelConfig(), context=32, rope_base=1e4,
)  # fmt: skip
EVERYTHING = changed(SMALL, {
    "phases": (PHASE,), "lora": LoraConfig(2, 2.0), "init_from": "x", "data.sources": SOURCES,
    "model.sliding_window": 8, "train.batch.start": 32, "train.batch.ramp_tokens": 64, "train.batch.micro_batch": 1,
    "checkpoint.keep_every": 3, "parallel.data": 1,
})  # fmt: skip


def leaves(section, prefix=""):
    """Key, class of its field (int or float), and a copy of `EVERYTHING` with another value there, for each number."""
    hints = typing.get_type_hints(type(section))
    for field in dataclasses.fields(section):
        value, key = getattr(section, field.name), f"{prefix}{field.name}"

        def put(new, name=field.name):
            return dataclasses.replace(section, **{name: new})

        if dataclasses.is_dataclass(value):
            yield from ((k, kind, lambda new, f=f, put=put: put(f(new))) for k, kind, f in leaves(value, f"{key}."))
        elif isinstance(value, tuple) and value and dataclasses.is_dataclass(value[0]):
            name = getattr(value[0], "name", "0")
            yield from ((k, kind, lambda new, f=f, put=put: put((f(new),)))
                        for k, kind, f in leaves(value[0], f"{key}.{name}."))  # fmt: skip
        else:
            kinds = {int, float} & {hints[field.name], *typing.get_args(hints[field.name])}
            kinds = set() if isinstance(value, Table) else kinds
            yield from ((key, kind, put) for kind in kinds)


LEAVES = list(leaves(EVERYTHING))


def test_the_configuration_of_everything_is_possible():
    EVERYTHING.check()
    keys = [key for key, _, _ in LEAVES]
    assert {"seed", "model.hidden_size", "phases.mid.batch.stepped.0.until", "lora.alpha"} <= set(keys)
    assert len(keys) > 80


@pytest.mark.parametrize(("key", "kind", "put"), LEAVES, ids=[key for key, _, _ in LEAVES])
def test_every_number_has_bounds(key, kind, put):
    values = [2**63, 99999999999999999999, 10**5000, -1, -(10**5000)] if kind is int else \
        [math.inf, -math.inf, math.nan, 1e300, -1.0]  # fmt: skip
    for value in values:
        message = refused({}, put(value))
        assert message.startswith(f"{key} is "), value
        assert len(message) < 300


@pytest.mark.parametrize("key", ["model.norm_eps", "evaluation.every", "checkpoint.keep_every", "optimizer.clip_norm"])
def test_zero_is_not_positive(key):
    assert refused({key: 0}).startswith(f"{key} is 0, but must be greater than 0")


def test_the_bounds_are_of_fields():
    fields = {f"{cls.__name__}.{field.name}" for cls in sections(Config) for field in dataclasses.fields(cls)}
    assert set(LARGEST) <= fields


def test_numbers_in_tables_are_checked_too():
    assert refused({"phases": (dataclasses.replace(PHASE, mixture=Table({"web": math.nan})),)}, EVERYTHING).startswith(
        "phases.mid.mixture.web is .nan, but must be a finite number"
    )


def test_sizes_that_are_too_large_together_are_refused():
    sizes = {"model.num_experts": 2**14, "model.hidden_size": 2**16, "model.expert_size": 2**17}
    assert "model.num_experts is 16384, but must be small enough" in refused(sizes)
