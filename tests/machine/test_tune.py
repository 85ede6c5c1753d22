import json

import jax
import pytest

from tests.train_helpers import ROOT
from zaya_jax.config import load_config
from zaya_jax.errors import InputError
from zaya_jax.machine import __main__ as command
from zaya_jax.machine import tune as room
from zaya_jax.machine.kernel_cases import SMALL, packed_documents
from zaya_jax.machine.tune import DECIDING, deciding_cases, local_sizes, time_case, totals, tune
from zaya_jax.ops import registry
from zaya_jax.ops.kernel_table import REFERENCE, Choice, own_table, parse_table, read_choice
from zaya_jax.ops.registry import OPERATIONS, KernelSelection, select_kernels, widths
from zaya_jax.ops.target import Target

EMULATED = Target("interpret", "cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(registry, "_rejected", {})


def test_candidates_are_timed_here_and_a_start_reads_the_table(capsys, monkeypatch):
    """The reference, and an emulated kernel with each of its tiles."""
    monkeypatch.setattr(room, "DECIDING", {"residual_norm": DECIDING["residual_norm"]})
    assert command.main(["kernels", "--tune", str(ROOT / "configs" / "bench_8b.yaml"), "--repeats", "1"]) == 0
    said = capsys.readouterr().out
    assert "do not compare these times with a GPU" in said
    assert f"Wrote {own_table('cpu')}, which training on this machine reads" in said
    table = json.loads(own_table("cpu").read_text())
    (size,) = table["operations"]["residual_norm"]["sizes"]
    kernel = {variant.partition(" ")[0] for variant in size["seconds"]}
    assert kernel == {REFERENCE, "pallas"}
    assert len(size["seconds"]) == 3, "of the kernel, both of its tiles"
    assert min(totals(size).values()) > 0
    found = parse_table(table, "cpu", "here")
    selection = select_kernels(EMULATED, SMALL.model, "bfloat16", found)
    assert selection.measured["residual_norm"] == (read_choice(size),)


def measured(monkeypatch, seconds):
    """The row of the table for the norm, if its variants take these times; an error if they take none."""

    def time_choice(case, kernels, repeats):
        (choice,) = kernels.variants("residual_norm") if "residual_norm" in kernels.chosen else (Choice(1, REFERENCE),)
        took = seconds[choice.variant]
        if took is None:
            raise RuntimeError("out of shared memory")
        return {"plain": took}

    monkeypatch.setattr(room, "time_case", time_choice)
    monkeypatch.setattr(room, "check_kernel", lambda selection, name, choice, *_, **__: (
        "it is wrong" if choice.variant == seconds.get("wrong") else "", True))  # fmt: skip
    selection = select_kernels(EMULATED, SMALL.model, "bfloat16")
    case = deciding_cases(SMALL, "bfloat16")["residual_norm backward"]
    return room._tune(selection, "residual_norm", case, 24, SMALL, "bfloat16", 1)


DEFAULT, OTHER = "pallas (64/1/1, 64×3×2×64/1/1)", "pallas (128/1/1, 64×3×2×64/1/1)"


@pytest.mark.parametrize(("seconds", "chosen"), [
    ({REFERENCE: 3.0, DEFAULT: 2.0, OTHER: 1.0}, OTHER),
    ({REFERENCE: 3.0, DEFAULT: 2.0, OTHER: 1.99}, DEFAULT),
    ({REFERENCE: 1.0, DEFAULT: 2.0, OTHER: 1.5}, REFERENCE),
    ({REFERENCE: 3.0, DEFAULT: 2.0, OTHER: None}, DEFAULT),
    ({REFERENCE: 3.0, DEFAULT: None, OTHER: None}, REFERENCE),
    ({REFERENCE: 3.0, DEFAULT: 2.0, OTHER: 1.0, "wrong": OTHER}, DEFAULT),
])  # fmt: skip
def test_the_fastest_that_runs_and_is_right_is_chosen(monkeypatch, seconds, chosen):
    row = measured(monkeypatch, seconds)
    assert read_choice(row).variant == chosen
    assert all(row["seconds"][variant] == {"plain": took} for variant, took in seconds.items()
               if variant != "wrong" and took is not None)  # fmt: skip
    failed = {variant for variant, took in seconds.items() if took is None} | {seconds.get("wrong")} - {None}
    assert row["not_used"].keys() == failed
    assert next(iter(row["seconds"])) == DEFAULT  # which reports name the first


def test_what_was_measured_before_at_other_sizes_stays_if_the_sources_do(tmp_path):
    def row(rows, sources="1"):
        return {"sources": sources, "sizes": [{"dtype": "bfloat16", "rows": rows, "widths": [], "tiles": {},
                                              "implementation": REFERENCE}]}  # fmt: skip

    path = tmp_path / "table.json"
    path.write_text(json.dumps({"device": "cpu", "operations": {"a": row(1), "b": row(2), "c": row(3, "0")}}))
    merged = room._merged(path, "cpu", {"a": row(1), "b": row(5), "c": row(6)})
    assert {name: [size["rows"] for size in found["sizes"]] for name, found in merged.items()} == {
        "a": [1], "b": [2, 5], "c": [6]}  # fmt: skip
    assert room._merged(tmp_path / "none.json", "cpu", {"a": row(1)}) == {"a": row(1)}


def test_sizes_are_those_of_a_device_in_each_phase(monkeypatch):
    config = load_config(str(ROOT / "configs" / "bench_8b.yaml"), [])
    (sizes,) = local_sizes(config)
    batch = config.batch_for(config.phases[0])
    assert sizes.tokens == batch.micro_batch * sizes.sequence
    assert sizes.experts == 16
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    eight = load_config(str(ROOT / "configs" / "zaya1_8b.yaml"), ["parallel.expert=2", "parallel.context=2"])
    found = local_sizes(eight)
    assert {(sizes.experts, sizes.sequence) for sizes in found} == {
        (16 // layout.expert, eight.context_for(phase) // layout.context)
        for phase in eight.phases for layout in [eight.parallel_for(phase)]}  # fmt: skip


def test_rows_and_widths_of_a_case_are_those_of_the_operation():
    """A start looks for the shape that it sees, and so for what was written here."""
    for name, deciding in DECIDING.items():
        for case, rows in deciding.items():
            shapes, operation = set(), OPERATIONS[name]

            def recorded(*arguments, operation=operation, shapes=shapes, **options):
                shapes.add(operation.shape(*arguments, **options))
                return operation.reference(*arguments, **options)

            class Recording(KernelSelection):
                def implementation(self, which, name=name, recorded=recorded):
                    return recorded if which == name else super().implementation(which)

            one = deciding_cases(SMALL, "bfloat16")[case]
            function, arguments = room.passes(one, Recording(Target("cpu", "cpu")))
            jax.eval_shape(function, *arguments)
            expected = (rows(SMALL), *widths(operation, SMALL.model, "bfloat16"))
            assert expected in shapes, (name, case)


def test_every_kernel_is_decided_by_a_case():
    with_kernels = {name for name, operation in OPERATIONS.items() if operation.kernels and not operation.measured_as}
    assert DECIDING.keys() == with_kernels


def test_a_case_is_timed_with_each_of_its_integers():
    one = deciding_cases(SMALL, "bfloat16")["experts of a step"]
    times = time_case(one, KernelSelection(Target("cpu", "cpu")), 1)
    assert times.keys() == {"plain", "uneven groups", "one group"}
    assert all(seconds > 0 for seconds in times.values())


def test_packed_documents_begin_anew_in_each_row():
    documents = packed_documents(3, 64)
    assert documents.shape == (3, 64)
    assert (documents[:, 0] == 1).all()
    assert (documents[:, 1:] - documents[:, :-1] >= 0).all()
    assert documents.max() > 1


def test_flags_that_contradict_are_refused(capsys):
    assert command.main(["kernels", "--tune", "--compile-for", "h200"]) == 2
    assert "--compile-for cannot be combined with --tune" in capsys.readouterr().err
    with pytest.raises(InputError):
        tune("nowhere.yaml", [], 1)
