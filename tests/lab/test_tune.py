import json

import jax
import pytest

from tests.kernel_helpers import kernels, traced_kernels
from tests.train_helpers import ROOT
from zaya_jax.config import load_config
from zaya_jax.errors import InputError
from zaya_jax.lab.kernel_cases import SMALL, packed_documents, passes
from zaya_jax.lab.measure import tune as room
from zaya_jax.lab.measure.tune import DECIDING, deciding_cases, local_sizes, time_case, totals, tune
from zaya_jax.lab.predict.calibration import as_work
from zaya_jax.machine import __main__ as command
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


def measured(monkeypatch, seconds, target=EMULATED):
    """The rows of the table for the norm, if its variants take these times; an error if they take none."""

    def time_choice(case, kernels, repeats):
        (choice,) = kernels.variants("residual_norm") if "residual_norm" in kernels.chosen else (Choice(1, REFERENCE),)
        took = seconds[choice.variant]
        if took is None:
            raise RuntimeError("out of shared memory")
        return {"plain": took}

    monkeypatch.setattr(room, "time_case", time_choice)
    monkeypatch.setattr(room, "check_kernel", lambda selection, name, choice, *_, **__: (
        "it is wrong" if choice.variant == seconds.get("wrong") else "", True))  # fmt: skip
    selection = select_kernels(target, SMALL.model, "bfloat16")
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
    (row,) = measured(monkeypatch, seconds)
    assert read_choice(row).variant == chosen
    assert all(row["seconds"][variant] == {"plain": took} for variant, took in seconds.items()
               if variant != "wrong" and took is not None)  # fmt: skip
    failed = {variant for variant, took in seconds.items() if took is None} | {seconds.get("wrong")} - {None}
    assert row["not_used"].keys() == failed
    assert next(iter(row["seconds"])) == DEFAULT  # which reports name the first


def test_what_the_chosen_kernel_launches_is_kept_on_devices_that_are_predicted(monkeypatch):
    h200, fast = Target("interpret", "NVIDIA H200"), {REFERENCE: 3.0, DEFAULT: 2.0, OTHER: 1.0}
    (row,) = measured(monkeypatch, fast, h200)
    works = [as_work(work) for work in row["works"]]
    assert min(work["times"] for work in row["works"]) >= 1
    assert sum(work.bytes for work in works) > 24 * 32 * 4, "emulated, a kernel is what XLA makes of it"
    for others, target in ((fast, EMULATED), (fast | {REFERENCE: 0.5}, h200)):
        (row,) = measured(monkeypatch, others, target)
        assert "works" not in row


def test_an_operation_of_which_nothing_runs_has_no_row(monkeypatch, capsys):
    assert measured(monkeypatch, {REFERENCE: None, DEFAULT: None, OTHER: None}) == []
    assert "residual_norm could not be timed: RuntimeError: out of shared memory" in capsys.readouterr().out


def test_each_operation_is_written_at_once_and_each_size_timed_once(monkeypatch, capsys):
    """A later phase of the same sizes, and what was measured before: at other sizes it stays if the sources do."""
    monkeypatch.setattr(room, "local_sizes", lambda config: [SMALL, SMALL._replace(sequence=2 * SMALL.sequence)])
    monkeypatch.setattr(room, "current_target", lambda: Target("interpret", "cpu"))
    monkeypatch.setattr(room, "DECIDING", {name: DECIDING[name] for name in ("residual_norm", "attention")})
    calls = []

    def tuned(selection, name, case, rows, sizes, dtype, repeats):
        calls.append((name, rows))
        if len(calls) == 4:
            raise KeyboardInterrupt
        return [size(name, rows)]

    def size(name, rows):
        return {"dtype": "bfloat16", "rows": rows, "widths": [*widths(OPERATIONS[name], SMALL.model, "bfloat16")],
                "implementation": REFERENCE, "tiles": {}, "seconds": {REFERENCE: {"plain": 1.0}}}  # fmt: skip

    monkeypatch.setattr(room, "_tune", tuned)
    with pytest.raises(KeyboardInterrupt):
        tune(None, [], 1)
    assert calls == [
        ("residual_norm", SMALL.tokens), ("attention", SMALL.sequence), ("attention", 1),
        ("attention", 2 * SMALL.sequence),
    ]  # fmt: skip
    table = json.loads(own_table("cpu").read_text())
    assert [one["rows"] for one in table["operations"]["attention"]["sizes"]] == [SMALL.sequence, 1]
    table["operations"]["residual_norm"]["sources"] = "0"
    table["operations"]["attention"]["sizes"] = [size("attention", 77)]
    own_table("cpu").write_text(json.dumps(table))
    calls.clear()
    with pytest.raises(KeyboardInterrupt):
        tune(None, [], 1)
    table = json.loads(own_table("cpu").read_text())
    assert {name: [one["rows"] for one in row["sizes"]] for name, row in table["operations"].items()} == {
        "residual_norm": [SMALL.tokens], "attention": [77, SMALL.sequence, 1]}  # fmt: skip
    own_table("cpu").write_text("{")
    calls.clear()
    capsys.readouterr()
    tune(None, [], 1, only=["residual_norm"])
    assert "Replaced: " in capsys.readouterr().out


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
    assert command.main(["kernels", "--repeats", "3"]) == 2
    assert "--repeats needs --tune" in capsys.readouterr().err
    with pytest.raises(InputError):
        tune("nowhere.yaml", [], 1)


@pytest.mark.parametrize("name", ["experts", "cca_mix", "cca_mix_step", "router_step"])
def test_each_case_that_decides_launches_what_its_tiles_cut(name):
    """Else noise would choose the tiles."""
    every, selection = deciding_cases(SMALL, "bfloat16"), kernels("interpret")
    for case in DECIDING[name]:
        run, arguments = passes(every[case], selection)
        assert {*traced_kernels(run, *arguments)} >= {*OPERATIONS[name].kernels[0].tiles}
