from zaya_jax.bench.ablations import _look, variants
from zaya_jax.bench.sweep import CONTEXT, small_config
from zaya_jax.model.arithmetic import total_parameters, training_flops_per_token


def test_each_variant_lacks_one_part_and_costs_about_the_same(tmp_path):
    whole = small_config(tmp_path, 20).model
    found = variants(whole)
    assert list(found) == ["zaya1", "gqa", "linear router", "no residual scaling"]
    assert len({total_parameters(model) for model in found.values()}) == 4
    for model in found.values():
        changed = [name for name in ("attention", "router", "residual_scaling")
                   if getattr(model, name) != getattr(whole, name)]  # fmt: skip
        assert len(changed) == (model is not whole)
        assert 0.8 < training_flops_per_token(model, CONTEXT) / training_flops_per_token(whole, CONTEXT) <= 1


def test_the_last_step_is_looked_at():
    for steps in range(1, 400):
        assert steps % _look(steps) == 0
    assert _look(150) == 10
