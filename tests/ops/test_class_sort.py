"""The counting sort against NumPy's stable sort."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from pallas_kernels.class_sort import class_sort
from tests.helpers import jit, seeds


@functools.cache
def sort(classes):
    return jit(functools.partial(class_sort, classes=classes, dtype=jnp.float32, architecture="interpret"))


@pytest.mark.parametrize(("tokens", "classes"), [(37, 4), (37, 5), (90, 1)])
@settings(max_examples=6)
@given(seed=seeds())
def test_tokens_are_in_the_order_of_their_classes(tokens, classes, seed):
    """Classes above the last are one class, whose tokens come last; some classes have no tokens."""
    label = np.random.default_rng(seed).integers(0, classes + 3, tokens).astype(np.int32)
    order, sizes = sort(classes)(label)
    bounded = np.minimum(label, classes)
    np.testing.assert_array_equal(order, np.argsort(bounded, kind="stable"))
    np.testing.assert_array_equal(sizes, np.bincount(bounded, minlength=classes + 1)[:classes])
