import jax
import jax.numpy as jnp

from tests.helpers import random_model, tiny_config


def products_in_gradient(remat: str) -> int:
    model = random_model(tiny_config("bare"))
    tokens = jnp.zeros((1, 8), jnp.int32)
    gradient = jax.make_jaxpr(jax.grad(lambda m: m(tokens, remat=remat).hidden_bsd.sum(), allow_int=True))(model)
    return str(gradient).count("dot_general")


def test_a_policy_keeps_named_products_so_that_fewer_are_made_again():
    assert products_in_gradient("dots") < products_in_gradient("full")
