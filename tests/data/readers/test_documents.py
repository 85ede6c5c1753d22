from hypothesis import given
from hypothesis import strategies as st

from zaya_jax.data.readers.documents import even_share


@given(total=st.integers(0, 10**13), count=st.integers(1, 50))
def test_parts_are_about_equal_and_add_up(total, count):
    parts = [even_share(total, count, i, i + 1) for i in range(count)]
    assert sum(parts) == total
    assert max(parts) - min(parts) <= 1
