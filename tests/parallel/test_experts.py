"""Tokens to experts on other devices, and back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from tests.helpers import assert_close
from tests.train_helpers import fast_jit, on_devices
from zaya_jax.config import ParallelConfig
from zaya_jax.ops.experts import dispatch_experts
from zaya_jax.parallel.experts import gathered_experts, ragged_experts
from zaya_jax.parallel.mesh import make_mesh

T, D, F, E = 12, 6, 5, 8


def exchange(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """What `jax.lax.ragged_all_to_all` does, from gathers, for platforms that have it not."""
    rank = jax.lax.axis_index(axis_name)
    everything = jax.lax.all_gather((operand, input_offsets, send_sizes, output_offsets), axis_name)
    row = jnp.arange(output.shape[0])
    for rows, begin, size, to in zip(*everything, strict=True):
        inside = (row >= to[rank]) & (row < to[rank] + size[rank])
        source = jnp.clip(begin[rank] + row - to[rank], 0, rows.shape[0] - 1)
        output = jnp.where(inside[:, None], rows[source], output)
    return output


def problem(seed, devices):
    rng = np.random.default_rng(seed)
    h = rng.normal(size=(devices * T, D))
    skewed = rng.choice(E + 1, size=devices * T, p=np.r_[0.4, 0.0, np.full(E - 2, 0.4 / (E - 2)), 0.2])
    expert = skewed.astype(np.int32) if seed else np.full(devices * T, 3, np.int32)  # seed 0: all to one
    weight = rng.random(devices * T)
    return (
        h,
        expert,
        weight,
        rng.normal(size=(E, D, 2 * F)),
        rng.normal(size=(E, F, D)),
        rng.normal(size=(devices * T, D)),
    )


def exchanged(cases, names):
    """Output and gradients of exchanges over some devices."""
    results = []
    for seed, devices in cases:
        with jax.enable_x64(True):
            mesh = make_mesh(ParallelConfig(expert=devices), jax.devices()[:devices])
            h, expert, weight, gate_up, down, out = problem(seed, devices)
            rows, experts = PartitionSpec("expert"), PartitionSpec("expert")
            operations = {"gathered": gathered_experts(dispatch_experts),
                          "ragged": ragged_experts(dispatch_experts, exchange, devices)}  # fmt: skip
            for op in (operations[name] for name in names):

                def region(h, weight, gate_up, down, expert, out, op=op):
                    def loss(*operands):
                        result = op(operands[0], expert, operands[1], operands[2], operands[3])
                        return (result * out).sum(), result

                    grads, result = jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True)(h, weight, gate_up, down)
                    return result, grads

                specs = (rows, rows, experts, experts, rows, rows)
                run = jax.shard_map(region, mesh=mesh, in_specs=specs, out_specs=(rows, (rows, rows, experts, experts)),
                                    check_vma=False)  # fmt: skip
                results.append(jax.device_get(fast_jit(run)(h, weight, gate_up, down, expert, out)))
    return results


def test_experts_on_other_devices_give_what_they_give_here():
    """By sending each token to its expert alone; the step of tests/parallel/test_layout.py gathers."""
    check([(1, 4)], ["ragged"])


@pytest.mark.soak
def test_experts_on_any_number_of_devices_give_what_they_give_here():
    check([(seed, devices) for seed in range(3) for devices in (2, 4, 8)], ["gathered", "ragged"])


def check(cases, names):
    results = iter(on_devices(8, "tests.parallel.test_experts:exchanged", cases, names))
    for seed, devices in cases:
        with jax.enable_x64(True):
            h, expert, weight, gate_up, down, out = problem(seed, devices)

            def loss(h, weight, gate_up, down, expert=expert, out=out):
                result = dispatch_experts(h, jnp.asarray(expert), weight, gate_up, down)
                return (result * out).sum(), result

            grads, result = fast_jit(jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True))(h, weight, gate_up, down)
            for _ in names:
                output, output_grads = next(results)
                assert_close(output, result, 1e-12)
                for grad, expected_grad in zip(output_grads, grads, strict=True):
                    assert_close(grad, expected_grad, 1e-12)
            assert np.count_nonzero(np.asarray(result).any(-1)) == np.count_nonzero(expert < E)
