"""The sizing rules by hand-computed cases, and the command."""

import dataclasses
import json

import pytest

from zaya_jax.config import load_config
from zaya_jax.hardware.data_sheets import HARDWARE
from zaya_jax.lab.predict.dry_run import memory
from zaya_jax.lab.predict.sizing import rules
from zaya_jax.lab.predict.sizing.rules import RULES, Measured, Product, Sizes, products, wave_efficiency
from zaya_jax.machine.__main__ import main

MODEL = load_config("configs/zaya1_8b.yaml").model
# The 8B with micro-batches of four sequences of 4,096 tokens on eight MI300X.
GOOD = Sizes(MODEL, 16384, {"data": 8, "fsdp": 1, "expert": 1, "context": 1}, {"data": 8}, HARDWARE["mi300x"],
             fits_twice=False, fits_unsharded=None, message=0, measured=Measured())  # fmt: skip


def sized(**model):
    return GOOD._replace(model=dataclasses.replace(MODEL, **model))


CASES = [
    (rules.vocabulary, GOOD, "PASS", None),  # 262,272 = 64 · 4,098
    (rules.vocabulary, sized(vocab_size=50257), "FAIL", None),
    (rules.head_dim, sized(head_dim=64), "WARN", None),
    (rules.head_dim, sized(head_dim=80), "FAIL", None),
    (rules.latent_widths, GOOD, "PASS", None),  # 8 · 128 and 2 · 128
    (rules.latent_widths, sized(head_dim=20), "FAIL", None),  # 160 and 40
    (rules.expert_width, sized(expert_size=1984), "WARN", None),  # 31 · 64
    (rules.expert_width, sized(expert_size=5461), "FAIL", None),  # 8 · 2,048 / 3, rounded
    (rules.rows, GOOD._replace(tokens=4104), "FAIL", None),  # 8 · 513
    (rules.rows, GOOD._replace(tokens=4112), "WARN", None),  # 16 · 257
    (rules.micro_batch, GOOD._replace(fits_twice=True), "WARN", None),
    # Gate and up: 2 · 16,384 · 2,048 · 4,096 = 275 GFLOP; down, half of it, is the least.
    (rules.saturating, GOOD, "WARN", None),
    (rules.saturating, GOOD._replace(tokens=24576), "PASS", None),  # 206 GFLOP
    (rules.saturating, GOOD._replace(tokens=4096), "FAIL", None),  # 34 GFLOP
    (rules.depth, GOOD, "WARN", None),  # the output of attention contracts 1,024
    (rules.depth, sized(num_query_heads=16), "PASS", None),
    (rules.whole_nodes, GOOD, "PASS", None),
    (rules.whole_nodes, GOOD._replace(in_node={"context": 2}), "WARN", 1 - 64 / 448),  # one link of seven
    (rules.whole_nodes, GOOD._replace(in_node={"context": 4}), "WARN", 1 - 3 * 64 / 448),
    (rules.whole_nodes, GOOD._replace(in_node={"context": 2}, hardware=HARDWARE["h200"]), "PASS", None),
    (rules.unsharded, GOOD._replace(fits_unsharded=True), "WARN", None),
    (rules.buffers, GOOD, "PASS", None),
    (rules.buffers, GOOD._replace(message=10**6), "OPEN", None),
    (rules.buffers, GOOD._replace(message=10**6, measured=Measured(knee=9e6)), "WARN", 0.5),  # n½: knee / 9
    (rules.expert_speed, GOOD, "OPEN", None),
    (rules.expert_speed, GOOD._replace(measured=Measured(experts=0.85)), "PASS", 0.15),
    (rules.expert_speed, GOOD._replace(measured=Measured(experts=0.6)), "WARN", 0.4),
    (rules.expert_speed, GOOD._replace(measured=Measured(experts=0.4)), "FAIL", 0.6),
    (rules.whole_instructions, GOOD, "PASS", None),
    (rules.whole_instructions, sized(router_size=40), "FAIL", None),
    (rules.strides, GOOD, "OPEN", None),  # 2,048 · 2 bytes
    (rules.strides, sized(hidden_size=2112), "PASS", None),
    (rules.strides, GOOD._replace(measured=Measured(stride=0.99)), "PASS", 0.01),
    (rules.strides, GOOD._replace(measured=Measured(stride=0.7)), "WARN", 0.3),
    (rules.buffers, GOOD._replace(message=9 * 10**6, measured=Measured(knee=9e6)), "PASS", 0.1),
]


@pytest.mark.parametrize(("rule", "sizes", "status", "loss"), CASES)
def test_rules_say_what_was_computed_by_hand(rule, sizes, status, loss):
    finding = rule(sizes)
    assert finding.status == status
    assert finding.loss == (None if loss is None else pytest.approx(loss))
    assert (finding.advice == "") == (status == "PASS")
    assert finding.reason.endswith(".")


def test_tiles_fill_waves():
    units = 304
    assert wave_efficiency(Product("", 1, 1, 304 * 128, 128, 8), units) == 1
    assert wave_efficiency(Product("", 1, 1, 305 * 128, 128, 8), units) == pytest.approx(305 / 608)
    assert wave_efficiency(Product("", 1, 304, 64, 128, 8), units) == 0.5  # half of each tile
    # 16 groups of 1,024 × 4,096: 16 · 8 · 32 = 4,096 tiles in 14 waves.
    gate = next(product for product in products(MODEL, 16384) if product.name == "experts, gate and up")
    assert (gate.groups, gate.rows, gate.columns, gate.depth) == (16, 1024, 4096, 2048)
    assert wave_efficiency(gate, units) == pytest.approx(4096 / (14 * 304))
    assert rules.waves(GOOD).status == "PASS"
    assert rules.waves(GOOD._replace(tokens=512)).status != "PASS"


def test_products_are_those_of_the_model():
    """Their FLOPs are those that the model counts for a token, but for the router's."""
    from zaya_jax.model.arithmetic import attention_flops_per_token, prefill_flops_per_token

    tokens = 16384
    counted = prefill_flops_per_token(MODEL, 4096) - attention_flops_per_token(MODEL, 4096)
    router = 2 * MODEL.num_layers * MODEL.router_size * (MODEL.hidden_size + 2 * MODEL.router_size + 17)
    listed = sum(product.times * product.flops for product in products(MODEL, tokens)) / tokens
    taps = 2 * MODEL.num_layers * (MODEL.num_query_heads + MODEL.num_kv_heads) * MODEL.head_dim**2  # a second product
    depthwise = 2 * MODEL.num_layers * (MODEL.query_size + MODEL.kv_size) * MODEL.depthwise_kernel
    assert listed + router + taps + depthwise == pytest.approx(counted)


def test_the_command_checks_every_phase(tmp_path, capsys, monkeypatch):
    # To count residuals a step is traced; the dry run's tests do. Here they need only grow with the tokens.
    monkeypatch.setattr(memory, "residual_bytes", lambda _, sequences, context: 2**20 * sequences * context)
    measured, output = tmp_path / "measured", tmp_path / "sizing.json"
    measured.mkdir()
    fit = {"operation": "all_gather", "devices": 8, "knee_bytes": 9e6}
    collectives = {"benchmark": "collectives", "fits": [fit, fit | {"devices": 2, "knee_bytes": 1.0}]}
    speeds = {-64: 10.0, 0: 8.0, 64: 10.0, 128: 11.0}
    strides = [{"family": "stride", "offset": offset, "depth": width + offset, "warm_flops_per_second": v * width}
               for width in (2048, 1024) for offset, v in speeds.items()]  # fmt: skip
    sizes = {"gate and up": (4096, 18.0), "down": (2048, 17.0), "of another width": (8192, 1.0)}
    experts = [{"family": "experts", "name": f"{name}, even, forward", "columns": columns, "depth": 2048,
                "warm_flops_per_second": speed} for name, (columns, speed) in sizes.items()]  # fmt: skip
    gemm = {"benchmark": "matrix products", "dtype": "bfloat16", "maximum": 20.0, "results": [*strides, *experts]}
    for name, made in (("a", collectives), ("b", gemm)):
        (measured / f"{name}.json").write_text(json.dumps(made))
    arguments = ["sizing", "configs/zaya1_8b.yaml", "parallel.fsdp=8", "--devices", "8", "--measured", str(measured)]
    status = main([*arguments, "--output", str(output)])
    result = json.loads(output.read_text())
    found = {phase: {row["rule"]: row for row in rows} for phase, rows in result["phases"].items()}
    assert list(found) == ["pretrain_1", "pretrain_2", "midtrain", "sft"]
    assert all(len(rows) == len(RULES) for rows in found.values())
    # The matrices of a layer in bf16: 2 · 16 · 3 · 2,048² of the experts, and a little more.
    message = found["pretrain_1"]["size of messages"]
    assert (message["status"], message["value"]) == ("PASS", "414 MB, saturated at 9 MB")
    assert found["pretrain_1"]["speed of the experts"]["loss"] == pytest.approx(0.15)
    assert found["pretrain_1"]["length of rows"]["loss"] == pytest.approx(0.2)
    assert found["pretrain_1"]["data parallelism first"]["value"] == "fsdp 8"
    assert status == int("failed" in result)
    out = capsys.readouterr().out
    assert out.startswith("Times are ranges, since no mi300x was measured: ")
    assert "\nSizing rules for training on 8 × mi300x\n" in out
    assert "Phase sft" in out


@pytest.mark.parametrize(("arguments", "message"), [
    ("no.yaml", "no.yaml"),
    ("configs/tiny.yaml --devices 0", "--devices is 0, but must be at least 1."),
    ("configs/tiny.yaml --hardware a100", "--hardware is 'a100', but must be one of mi300x"),
    ("configs/tiny.yaml --measured configs/tiny.yaml", "--measured is 'configs/tiny.yaml', but must be a folder"),
])  # fmt: skip
def test_bad_input_is_named(arguments, message, capsys):
    assert main(["sizing", *arguments.split()]) == 2
    assert message in capsys.readouterr().err
