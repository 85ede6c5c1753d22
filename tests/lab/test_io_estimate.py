import pytest
from hypothesis import given
from hypothesis import strategies as st

from zaya_jax.lab.measure.io_estimate import PAGE_BYTES, io_estimate

# docs/reference.md §6.3
ZAYA1 = {"sequences": 4096, "context": 4096, "token_bytes": 4, "extra_pages": 0.0, "step_seconds": 2.5,
         "max_iops": 70_000}  # fmt: skip


@pytest.mark.parametrize("extra_pages", [0, 28])  # 28 beside the 4 that the tokens fill: fragmentation 8
def test_the_published_numbers_of_the_run(extra_pages):
    scattered = 1 + extra_pages / 4
    load = io_estimate(**{**ZAYA1, "extra_pages": extra_pages})
    assert (load.bytes_per_step, load.fragmentation) == (64 * 2**20, scattered)
    assert load.operations_per_step == 16_384 * scattered
    assert load.operations_per_second == pytest.approx(6554 * scattered, abs=4)
    assert load.shortest_step_seconds == pytest.approx(0.234 * scattered, abs=0.0005 * scattered)


sizes = st.integers(1, 2**20)


@given(sizes, sizes, st.sampled_from([2, 4]), st.integers(0, 1000), st.floats(0.01, 1000))
def test_each_sequence_reads_its_pages_and_the_extra_ones_and_the_shortest_step_uses_all_operations(
    sequences, context, token_bytes, extra_pages, seconds
):
    fields = {"sequences": sequences, "context": context, "token_bytes": token_bytes, "extra_pages": extra_pages}
    load = io_estimate(**fields, step_seconds=seconds, max_iops=70_000)
    pages = sequences * (context * token_bytes / PAGE_BYTES + extra_pages)
    assert load.operations_per_step == pytest.approx(pages)
    assert load.operations_per_second * seconds == pytest.approx(pages)
    shortest = io_estimate(**fields, step_seconds=load.shortest_step_seconds, max_iops=70_000)
    assert shortest.operations_per_second == pytest.approx(70_000)
