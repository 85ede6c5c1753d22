import dataclasses
import json

import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.tiles import TILES, Tile, tile, tiles
from tests.kernel_helpers import traced_kernels
from zaya_jax.errors import InputError
from zaya_jax.ops import kernel_table, registry
from zaya_jax.ops.kernel_table import (
    REFERENCE,
    Choice,
    find_table,
    nearest,
    own_table,
    parse_table,
    read_choice,
    sources_digest,
)
from zaya_jax.ops.registry import OPERATIONS, select_kernels, validate_kernels, widths
from zaya_jax.ops.selfcheck import EXAMPLE
from zaya_jax.ops.target import Target

GPU = Target("cuda", "NVIDIA H200", "sm_90")
EMULATED = Target("interpret", "any")
SMALL = dataclasses.replace(EXAMPLE, num_query_heads=2, num_kv_heads=1, head_dim=64, hidden_size=64, num_experts=2,
                            expert_size=32)  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_tried(monkeypatch, tmp_path):
    monkeypatch.setattr(registry, "_rejected", {})
    monkeypatch.setattr(registry, "_passed", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def size(rows, implementation, tiles=None, name="residual_norm", model=EXAMPLE, dtype="bfloat16"):
    return {"dtype": dtype, "rows": rows, "widths": list(widths(OPERATIONS[name], model, dtype)),
            "implementation": implementation, "tiles": tiles or {}}  # fmt: skip


def content(*sizes, name="residual_norm", device="NVIDIA H200"):
    sources = sources_digest(*OPERATIONS[name].modules)
    return {"device": device, "operations": {name: {"sources": sources, "sizes": list(sizes)}}}


def selected(tree, target=GPU, model=EXAMPLE, dtype="bfloat16", **pinned):
    return select_kernels(target, model, dtype, parse_table(tree, target.device_kind, "a file"), pinned)


def test_what_was_measured_runs():
    selection = selected(content(size(1024, REFERENCE)))
    assert "residual_norm" not in selection.chosen
    assert "attention" in selection.chosen, "without a measurement, the default"
    assert selection.implementation("residual_norm") is OPERATIONS["residual_norm"].reference
    assert "Measured in a file: residual_norm." in str(selection)


def test_each_size_runs_the_choice_of_the_nearest_one():
    selection = selected(content(size(64, REFERENCE), size(4096, "pallas")))

    def launched(rows):
        rows = jnp.zeros((rows, EXAMPLE.hidden_size))
        norm = selection.implementation("residual_norm")
        return traced_kernels(lambda x: norm(x, x, None, x[0], 1e-5, jnp.float32), rows)

    assert [launched(rows) for rows in (8, 400, 600, 5000)] == [[], [], *[["residual_norm_forward"]] * 2]


def test_tiles_are_those_that_were_measured():
    (default, other) = tiles("residual_norm", "interpret", "bfloat16")
    assert default != other
    written = {"residual_norm": [list(other.sizes), other.warps, other.stages]}
    selection = selected(content(size(64, "pallas", written, model=SMALL), device="any"), EMULATED, SMALL)
    selection = selection.without(OPERATIONS.keys() - {"residual_norm"})
    (choice,) = selection.variants("residual_norm")
    assert choice.tiles == (("residual_norm", other),)
    assert choice.variant == "pallas (128/1/1)"
    assert validate_kernels(selection, SMALL, "bfloat16") == selection

    def tiles_that_run(name, architecture, dtype):
        used.append(tile(name, architecture, dtype))
        return used[-1]

    used = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pallas_kernels.residual_norm.tile", tiles_that_run)
        x = jnp.zeros((8, 64), jnp.float32)
        selection.ops.residual_norm(x.astype(jnp.bfloat16), x, None, x[0], 1e-5, jnp.bfloat16)
        selection.ops.residual_norm(x, x, None, x[0], 1e-5, jnp.float32)  # not measured: the optimizer's may be, too
    assert used == [other, default]


def test_a_wrong_tile_is_rejected_and_the_default_takes_its_place(monkeypatch):
    other = tiles("residual_norm", "interpret", "bfloat16")[1]
    written = {"residual_norm": [list(other.sizes), other.warps, other.stages]}
    selection = selected(content(size(64, "pallas", written, model=SMALL), device="any"), EMULATED, SMALL)
    check = registry.check_kernel
    monkeypatch.setattr(registry, "check_kernel", lambda selection, name, choice, *rest: (
        ("it is wrong.", True) if choice.tiles else check(selection, name, choice, *rest)))  # fmt: skip
    with pytest.warns(UserWarning, match=r"pallas \(128/1/1\) kernel for residual_norm .* it is wrong"):
        found = validate_kernels(selection.without(OPERATIONS.keys() - {"residual_norm"}), SMALL, "bfloat16")
    assert found.measured == {"residual_norm": (Choice(64, "pallas", (), "bfloat16"),)}


@pytest.mark.parametrize(("change", "note"), [
    ({"sources": "0", "sizes": [size(64, REFERENCE)]}, "residual_norm was measured with other kernels than this"),
    ({"sizes": [size(64, "hand")]}, "this version has no hand for residual_norm, which"),
    ({"sizes": [size(64, "pallas", {"residual_norm": [[3], 4, 1]})]}, "this version has no pallas (3/4/1) for"),
    ({"sizes": [size(64, "pallas", {"decode": [[64, 512], 4, 2]})]}, "this version has no pallas (64×512/4/2) for"),
    ({"sizes": []}, "residual_norm was not measured; cca_mix was not measured; attention"),
    ({"sizes": [size(64, "pallas") | {"widths": [96]}]}, "residual_norm was not measured in bfloat16 at widths [512]"),
    ({"sizes": [size(64, REFERENCE, dtype="float32")]}, "residual_norm was not measured in bfloat16 at widths [512]"),
])  # fmt: skip
def test_what_cannot_be_used_is_said_and_the_default_runs(change, note):
    tree = content()
    tree["operations"]["residual_norm"] |= change
    selection = selected(tree)
    assert selection.chosen["residual_norm"] == "pallas"
    assert not selection.measured
    assert note in str(selection)
    assert "there the default runs. Measure again with python -m zaya_jax.machine kernels --tune." in str(selection)


def test_a_table_of_two_dtypes_serves_both():
    tile = {"residual_norm": [[4096], 8, 1]}  # of bfloat16 alone
    tree = content(size(64, "pallas", tile), size(64, REFERENCE, dtype="float32"))
    assert selected(tree).measured["residual_norm"][0].variant == "pallas (4096/8/1)"
    assert selected(tree, dtype="float32").measured["residual_norm"][0].kernel == REFERENCE


def test_kernels_of_the_parts_of_a_measured_reference_are_validated():
    tree = content(size(8, REFERENCE, name="experts"), size(1024, "pallas", name="experts"), name="experts")
    parts = {"grouped_product", "grouped_product_transposed", "grouped_outer"}
    assert parts <= selected(tree).kernels.keys()
    assert not parts & selected(content(size(1024, "pallas", name="experts"), name="experts")).kernels.keys()


def test_the_parts_of_attention_follow_its_pin():
    parts = {"partial_attention", "partial_attention_gradient"}
    assert not parts & selected(content(), attention=REFERENCE).chosen.keys()
    assert parts <= selected(content(), attention="pallas").chosen.keys()


def test_the_parts_of_attention_follow_its_measurement():
    selection = selected(content(size(4096, REFERENCE, name="attention"), name="attention"))
    assert not {"attention", "partial_attention", "partial_attention_gradient"} & selection.chosen.keys()


def test_a_pin_outranks_measurements_and_what_cannot_be_pinned_is_named():
    tree = content(size(64, REFERENCE))
    assert selected(tree, residual_norm="pallas").chosen["residual_norm"] == "pallas"
    assert "attention" not in selected(tree, attention=REFERENCE).chosen
    for pinned, message in (
        (
            {"atention": REFERENCE},
            r"ops\.atention is no operation with several implementations\. Did you mean ops\.att",
        ),
        ({"router": REFERENCE}, r"There are: residual_norm, cca_mix, attention"),
        ({"attention": "palas"}, r"ops\.attention is 'palas', but must be one of reference, pallas,.* mean pallas\?"),
    ):
        with pytest.raises(InputError, match=message):
            selected(tree, **pinned)
    with pytest.raises(
        InputError, match=r"ops\.attention=pallas cannot be used: cpu has no such kernel\. Set ops\.att"
    ):
        select_kernels(Target("cpu", "cpu"), EXAMPLE, "bfloat16", None, {"attention": "pallas"})
    odd = dataclasses.replace(EXAMPLE, head_dim=48)
    with pytest.raises(InputError, match=r"ops\.attention=pallas cannot be used: .* not 48"):
        select_kernels(GPU, odd, "bfloat16", None, {"attention": "pallas"})


def write(tree):
    path = own_table(tree["device"])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(tree), encoding="utf-8")
    return path


def test_one_s_own_table_comes_before_the_shipped_one_and_a_foreign_one_is_said(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(kernel_table, "_SHIPPED", tmp_path / "shipped")
    assert find_table(GPU, said.append) is None
    (tmp_path / "shipped").mkdir()
    shipped = tmp_path / "shipped" / "nvidia_h200.json"
    shipped.write_text(json.dumps(content(size(64, REFERENCE))), encoding="utf-8")
    assert find_table(GPU, said.append).source == str(shipped)
    own = write(content(size(64, "pallas"), size(128, REFERENCE)))
    found = find_table(GPU, said.append)
    assert found.source == f"{own} and {shipped}"
    assert found.content["operations"] == content(size(64, "pallas"), size(128, REFERENCE))["operations"]
    write(content(size(128, "pallas")))
    sizes = find_table(GPU, said.append).content["operations"]["residual_norm"]["sizes"]
    assert sizes == [size(64, REFERENCE), size(128, "pallas")]
    path = write(content(size(4096, REFERENCE, name="attention"), name="attention"))
    assert find_table(GPU, said.append).content["operations"].keys() == {"residual_norm", "attention"}
    assert not said
    path.write_text(json.dumps(content(device="NVIDIA H100")), encoding="utf-8")
    assert find_table(GPU, said.append).source == str(shipped)
    assert said == [f"Not used: The kernels in {path} were measured on 'NVIDIA H100', not on NVIDIA H200."]


LEAVES = st.none() | st.booleans() | st.integers(-3, 3) | st.floats() | st.text(max_size=3)
JSON = st.recursive(LEAVES, lambda x: st.lists(x, max_size=2) | st.dictionaries(st.text(max_size=3), x, max_size=2))
PATHS = [("device",), ("operations",), ("operations", "residual_norm"), *(
    ("operations", "residual_norm", *rest)
    for rest in (("sources",), ("sizes",), ("sizes", 0), *(("sizes", 0, key) for key in size(1, "")),
                 ("sizes", 0, "tiles", "residual_norm"), ("sizes", 0, "tiles", "residual_norm", 0)))]  # fmt: skip


@settings(max_examples=150)
@given(path=st.sampled_from(PATHS), value=JSON, remove=st.booleans())
def test_a_damaged_table_is_refused_or_said_but_never_crashes(path, value, remove):
    tree = content(size(64, "pallas", {"residual_norm": [[2048], 4, 1]}))
    inner = tree
    for key in path[:-1]:
        inner = inner[key]
    if remove:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    try:
        table = parse_table(tree, "NVIDIA H200", "a file")
    except InputError:
        return
    operation = OPERATIONS["residual_norm"]
    choices, note = table.choices(operation, operation.modules, GPU, "bfloat16", (EXAMPLE.hidden_size,))
    assert all(isinstance(choice, Choice) for choice in choices)
    assert isinstance(note, str)


def test_the_digest_is_of_the_code_of_an_operation_and_its_kernels(tmp_path, monkeypatch):
    package = tmp_path / "pallas_kernels_of_a_test.py"
    package.write_text('"""Words."""\nfrom pallas_kernels.launch import launch\nx = 1  # one\n', encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))

    def digest(text):
        package.write_text(text, encoding="utf-8")
        sources_digest.cache_clear()
        return sources_digest("pallas_kernels_of_a_test")

    first = digest('"""Words."""\nfrom pallas_kernels.launch import launch\nx = 1  # one\n')
    assert digest('"""Others,\nmore."""\n\nfrom pallas_kernels.launch import launch\nx = 1\n') == first
    assert digest("from pallas_kernels.launch import launch\nx = 2\n") != first
    assert digest("x = 1\n") != first, "the kernels that it imports count"
    loops = [
        digest(f"from pallas_kernels import launch\nfor i in y:\n    x = 1\n{more}x = 2\n") for more in ("", "    ")
    ]
    assert loops[0] != loops[1]
    one, other = (digest(f"from zaya_jax.ops import {names}\n") for names in ("norm, stacked", "norm"))
    assert one != other, "all that it imports counts"
    sources_digest.cache_clear()
    digests = {sources_digest(*operation.modules) for operation in OPERATIONS.values()}
    assert len(digests) == len({operation.modules for operation in OPERATIONS.values()})


def test_kernels_declare_few_tiles_each_once_and_the_default_first():
    for name, by_architecture in TILES.items():
        for architecture in by_architecture:
            declared = tiles(name, architecture, "bfloat16")
            assert len(set(declared)) == len(declared) <= 12
            assert declared[0] == tile(name, architecture, "bfloat16")
    for operation in OPERATIONS.values():
        for kernel in operation.kernels:
            assert {*kernel.tiles} <= TILES.keys()


def test_the_nearest_is_so_by_ratio():
    choices = [Choice(rows, str(rows)) for rows in (1, 64, 4096)]
    found = {rows: nearest(choices, rows).rows for rows in (0, 1, 7, 9, 64, 500, 600, 10**6)}
    assert found == {0: 1, 1: 1, 7: 1, 9: 64, 64: 64, 500: 64, 600: 4096, 10**6: 4096}


def test_the_shipped_tables_can_be_read():
    for path in kernel_table._SHIPPED.glob("*.json"):
        tree = json.loads(path.read_text(encoding="utf-8"))
        assert kernel_table._file_name(tree["device"]) == path.stem
        table = parse_table(tree, tree["device"], str(path))
        assert tree["operations"].keys() <= OPERATIONS.keys()
        for row in table.content["operations"].values():
            assert all(isinstance(read_choice(size), Choice) for size in row["sizes"])
            assert all(isinstance(tile, Tile) for size in row["sizes"] for _, tile in read_choice(size).tiles)
