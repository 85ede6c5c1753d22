import json
import pickle
from functools import partial
from operator import add

from hypothesis import given
from hypothesis import strategies as st

from zaya_jax.data.readers.unit import Document, FirstLine, Unit, part


@given(total=st.integers(0, 10**13), count=st.integers(1, 50))
def test_parts_are_about_equal_and_add_up(total, count):
    parts = [part(total, count, i, i + 1) for i in range(count)]
    assert sum(parts) == total
    assert max(parts) - min(parts) <= 1


def test_a_unit_survives_json_and_pickle():
    unit = Unit("text", ("a", "b"), 0, 2, 7)
    fields = json.loads(json.dumps(unit._asdict()))
    assert Unit(**{**fields, "files": tuple(fields["files"])}) == unit
    assert pickle.loads(pickle.dumps(unit)) == unit  # noqa: S301


def test_the_first_line_is_found_once_and_only_when_asked_for():
    asked = []
    document = Document("text", "file", 4, 2, FirstLine(lambda: asked.append(1) or 5))
    assert not asked
    assert (document.line, document.line) == (7, 7)
    assert asked == [1]


def test_a_document_survives_pickle():
    document = Document("text", "file", 4, 2, FirstLine(partial(add, 2, 3)))
    assert pickle.loads(pickle.dumps(document)).line == 7  # noqa: S301
