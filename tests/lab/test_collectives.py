"""The sweep of collectives: results, compiled programs, conventions, tables, fit and input."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.devices_helpers import on_devices
from tests.lab.helpers import parse_rows
from zaya_jax.config import ParallelConfig
from zaya_jax.lab.measure.collectives import collectives_sweep as sweep_module
from zaya_jax.lab.measure.collectives import programs as programs_module
from zaya_jax.lab.measure.collectives.collectives_sweep import fit_times
from zaya_jax.lab.measure.collectives.operations import COLLECTIVES, pattern
from zaya_jax.lab.measure.collectives.programs import (
    IN_GRAPH,
    Case,
    Programs,
    TimedCase,
    collective_counts,
    wrong_elements,
)
from zaya_jax.lab.measure.collectives.text import footer, header, row
from zaya_jax.machine.__main__ import main
from zaya_jax.parallel.mesh import make_mesh
from zaya_jax.train.program import PhaseProgram

HERE = "tests.lab.test_collectives:"
SIZES = [8 * 2**i for i in range(21)]


def reference(name, rows):
    """What a collective returns, by numpy: rows [n, input of a rank] → [n, output of a rank]."""
    n = len(rows)
    return {
        "all_reduce": lambda: np.tile(rows.sum(0), (n, 1)),
        "reduce_scatter": lambda: rows.sum(0).reshape(n, -1),
        "all_gather": lambda: np.tile(rows.reshape(-1), (n, 1)),
        "broadcast": lambda: np.tile(rows[0], (n, 1)),
        "all_to_all": lambda: rows.reshape(n, n, -1).swapaxes(0, 1).reshape(n, -1),
        "permute": lambda: np.roll(rows, 1, 0),
    }[name]()


def compared():
    """Compare results and expectations with numpy for two groups of four side by side; then check one operation."""
    mesh = make_mesh(ParallelConfig(data=2, fsdp=4))
    for name, collective in COLLECTIVES.items():
        programs = Programs(Case(collective, mesh, ("fsdp",), 5 * 4, "bfloat16"))
        x, out = (np.asarray(array, np.float32) for array in (programs.fill(), programs.run(programs.fill())))
        for rows, results in zip(x.reshape(2, 4, -1), out.reshape(2, 4, -1), strict=True):
            np.testing.assert_array_equal(results, reference(name, rows), name)
        assert wrong_elements(programs) == wrong_elements(Programs(programs.case, in_place=True)) == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs_module, "COLLECTIVES", {"all_reduce": COLLECTIVES["all_reduce"]})
        return programs_module.check_collectives()


def reversed_ring():
    """Count wrong elements of a ring that turns the other way, and operations of a program in a loop."""
    case = Case(COLLECTIVES["permute"], make_mesh(), ("data",), 256, "float32")
    places = Programs(case), Programs(case, in_place=True)
    count = collective_counts(places[1].in_graph.as_text())
    permute = jax.lax.ppermute
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.lax, "ppermute", lambda x, axis, pairs: permute(x, axis, [(b, a) for a, b in pairs]))
        return [count, *map(wrong_elements, places)]


def test_results_equal_numpy():
    assert "skipped" in programs_module.check_collectives()  # one device
    assert on_devices(8, HERE + "compared") == {"devices": 8, "dtypes": ["float32", "bfloat16", "int32"]}


def test_wrong_elements_are_counted_and_so_are_operations_in_a_loop():
    count, *wrong = on_devices(8, HERE + "reversed_ring")
    assert count == {"collective-permute": IN_GRAPH}
    assert wrong == [8 * 256, 8 * 256]


def test_a_program_without_the_collective_is_refused():
    removed = COLLECTIVES["all_reduce"]._replace(run=lambda x, _axes: x)
    case = Case(removed, make_mesh(), ("data",), 4, "float32")
    with pytest.raises(RuntimeError, match="must have 1 of all-reduce"):
        _ = Programs(case).run


@given(st.integers(2, 1024), st.sampled_from(("float32", "bfloat16", "int8")))
def test_patterns_are_exact_in_every_dtype(n, dtype):
    numbers = pattern(n, dtype)
    rank = np.arange(n)[:, None]
    rows = np.where(rank % numbers.stride == 0, (rank + np.arange(2 * numbers.period)) % numbers.period, 0)
    np.testing.assert_array_equal(numbers.value(-1, jnp.arange(2 * numbers.period)), rows.sum(0))
    assert rows.sum(0).max() <= (127 if dtype == "int8" else 256)
    assert len(np.unique(rows[0])) > 1


@given(st.integers(2, 512), st.floats(1e8, 1e12), st.integers(1, 1000))
def test_an_ideal_ring_has_one_bus_bandwidth(n, link, chunk):
    """A ring sends (n − 1) / n of the buffer over each link, an all-reduce twice; a broadcast, all of it."""
    for name, collective in COLLECTIVES.items():
        case = Case(collective, make_mesh(devices=n), ("data",), chunk * n, "float32")
        sent = case.size * {"all_reduce": 2 * (n - 1) / n, "broadcast": 1, "permute": 1}.get(name, (n - 1) / n)
        assert case.bus_bandwidth(sent / link) == pytest.approx(link)
        assert collective.passed(case.elements, n) * 4 * (n if collective.whole_chunks else 1) == case.size


@given(st.floats(1e-9, 1e7), st.integers(0, 999_999), st.sampled_from(tuple(COLLECTIVES)), st.booleans())
def test_rows_have_the_form_of_nccl_tests(seconds, wrong, name, both):
    case = Case(COLLECTIVES[name], make_mesh(devices=4), ("data",), 4096, "bfloat16")
    half = TimedCase(case, [seconds], wrong)
    line = row(half if both else None, half)
    assert len(line) == 52 + (33 if both else 32) + 33
    (fields,) = parse_rows(line)
    assert (int(fields["size"]), fields["type"], int(fields["root"])) == (8192, "bfloat16", -(name != "broadcast"))
    assert ("time" in fields) == both
    assert float(fields["time_in_place"]) == pytest.approx(seconds * 1e6, rel=0.06, abs=0.006)
    assert float(fields["wrong_in_place"]) == pytest.approx(wrong, rel=1e-5)


def test_a_table_is_aligned_and_says_whether_results_were_wrong():
    case = Case(COLLECTIVES["all_gather"], make_mesh(), ("data",), 4096, "float32")
    lines, once = header("all_gather", [case], "dispatch", 20), TimedCase(case, [1], 0)
    assert len(lines[-1]) == len(lines[-2]) == len(row(once, once)) + 1
    assert "# Out of bounds values : 0 OK" in footer("all_gather", [once])
    assert "# Out of bounds values : 1 FAILED" in footer("all_gather", [once, once._replace(wrong=3)])


def test_confidence_intervals_cover_what_they_promise():
    generator = np.random.default_rng(0)
    covered = []
    for _ in range(2000):
        alpha, beta = 10 ** generator.uniform(-6, -4), 10 ** generator.uniform(8, 11.5)
        noise = generator.uniform(0.01, 0.1) * generator.standard_normal(len(SIZES))
        fit = fit_times(SIZES, ((alpha + np.array(SIZES) / beta) * (1 + noise)).tolist())
        intervals = (fit["alpha_seconds"], alpha), (fit["beta_bytes_per_second"], beta)
        covered.append([each["low"] <= value <= (each["high"] or np.inf) for each, value in intervals])
    assert (np.mean(covered, 0) >= 0.93).all()
    assert (np.mean(covered, 0) <= 0.97).all()


def test_the_knee_is_where_nine_tenths_of_the_bandwidth_are_reached():
    fit = fit_times(SIZES, [1e-5 + size / 1e9 for size in SIZES])
    assert fit["alpha_seconds"]["value"] == pytest.approx(1e-5)
    assert fit["beta_bytes_per_second"]["value"] == pytest.approx(1e9)
    assert fit["half_bytes"] == pytest.approx(1e4)
    assert fit["knee_bytes"] / (1e-5 + fit["knee_bytes"] / 1e9) == pytest.approx(0.9e9)
    assert fit_times([8, 16], [1, 2]) == fit_times([8, 16, 32], [3, 2, 1]) == {}


def made_up(case, mode, repeats):
    """Times of 10 µs and 1 ns a byte, in place, and twice that out of place."""
    seconds = 1e-5 + case.size / 1e9
    return {
        "out_of_place": TimedCase(case, [2 * seconds] * repeats, 0),
        "in_place": TimedCase(case, [seconds] * repeats, 0),
    }


def sweep(folder):
    """Run the command on the devices of this process: with times that are made up, then in groups with real ones."""
    arguments = ["collectives", "--repeats", "2", "--png", f"{folder}/plot.png"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep_module, "time_case", made_up)
        sizes = ["--max-bytes", "2M", "--factor", "512", "--devices", "2", "4", "--output", f"{folder}/result"]
        assert main([*arguments, "--operations", "all_reduce", "all_to_all", *sizes]) == 0
    groups = ["--max-bytes", "64", "--factor", "4", "--data", "2", "--fsdp", "4", "--axis", "fsdp", "--mode", "graph"]
    assert main([*arguments, "--operations", "all_to_all", *groups, "--output", f"{folder}/groups"]) == 0


def test_the_command_writes_tables_rows_fits_and_a_plot(tmp_path):
    on_devices(8, HERE + "sweep", str(tmp_path))
    result, groups = (json.loads((tmp_path / name).read_text()) for name in ("result", "groups"))
    rows = [*result["results"], *groups["results"]]
    assert len(rows) == 2 * 2 * 3 + 2  # operations × device counts × sizes, then sizes: 8 bytes are too few for four
    assert {(row["devices"], row["groups"], row["mode"]) for row in rows} == {
        (2, 1, "dispatch"), (4, 1, "dispatch"), (4, 2, "graph")}  # fmt: skip
    assert all(row["wrong"] == 0 for row in rows)
    assert [(fit["operation"], fit["devices"]) for fit in result["fits"]] == [
        ("all_reduce", 2), ("all_to_all", 2), ("all_reduce", 4), ("all_to_all", 4)]  # fmt: skip
    for fit in result["fits"]:
        assert fit["alpha_seconds"]["value"] == pytest.approx(2e-5)
        assert fit["beta_bytes_per_second"]["value"] == pytest.approx(0.5e9)
        assert (fit["half_bytes"], fit["knee_bytes"]) == pytest.approx((1e4, 9e4))
    for times in (each["in_place"] for each in groups["results"]):
        assert 0 < times["min"] <= times["p50"] <= times["p99"] <= times["max"]
    assert (tmp_path / "plot.png").read_bytes()[:4] == b"\x89PNG"


def small_step(program, _stage):
    """A program whose messages are known, for a training step's, which takes seconds to compile."""

    def shard(x):  # float32 [64] of each device
        for _ in range(2):  # layers
            x = jax.lax.fori_loop(0, 3, lambda _, y: y + jax.lax.all_gather(y, "fsdp").max(0), x)
        x = jax.lax.all_to_all(x, ("data", "fsdp"), 0, 0, tiled=True)
        return jax.lax.psum(jax.lax.all_gather(x[:32], "data", tiled=True), "fsdp")

    mesh, spec = program.placement.mesh, jax.P(("data", "fsdp"))
    step = jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    return step.trace(jax.ShapeDtypeStruct((64 * mesh.size,), "float32", sharding=jax.NamedSharding(mesh, spec)))


def messages(folder):
    """Measure the messages of `small_step` over 8 devices."""
    arguments = ["--operations", "all_gather", "all_to_all", "--repeats", "1", "--output", f"{folder}/result"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PhaseProgram, "trace", small_step)
        patch.setattr(sweep_module, "time_case", made_up)
        assert main(["collectives", *arguments, "--config", "configs/tiny.yaml", "parallel.fsdp=2"]) == 0


def test_the_messages_of_a_step_are_measured_at_their_sizes(tmp_path):
    on_devices(8, HERE + "messages", str(tmp_path))
    result = json.loads((tmp_path / "result").read_text())
    expected = [("all_gather", ["data"], 512, 1), ("all_gather", ["fsdp"], 512, 6),
                ("all_to_all", ["data", "fsdp"], 256, 1)]  # fmt: skip
    assert [tuple(row.values()) for row in result["messages"]] == [
        (*message, pytest.approx(2e-5 + 2 * message[2] / 1e9, rel=0.01)) for message in expected
    ]
    assert result["benchmark"] != "collectives"  # whose fits set the preset


@pytest.mark.parametrize(("arguments", "message"), [
    ("--config configs/tiny.yaml --fsdp 2", "--config has its own layout: leave --devices"),
    ("--config configs/tiny.yaml --max-bytes 1K", "--config has its own sizes: leave --min-bytes"),
    ("--config configs/tiny.yaml", "There is one device, but a collective needs at least two."),
    ("--max-bytes 4", "--max-bytes is '4', but must be at least --min-bytes, 8."),
    ("--min-bytes 8X", "--min-bytes is '8X', but must be a number of bytes, such as 8, 64K, 16M or 1G."),
    ("--factor 1", "--factor is 1, but must be at least 2."),
    ("--devices 1", "--devices is 1, but must be at least 2."),
    ("--devices 4096", "--devices is 4096, but this process has"),
    ("--devices 2 --fsdp 2", "--devices does not go with --axis and the sizes of mesh axes: remove one."),
    ("--fsdp 3", "--fsdp 3 is 3, but must divide 1, the number of devices."),
    ("", "There is one device, but a collective needs at least two."),
])  # fmt: skip
def test_bad_input_is_named(arguments, message, capsys):
    assert main(["collectives", *arguments.split()]) == 2
    assert message in capsys.readouterr().err
