import pytest

from zaya_jax.data.readers.values import is_document, refuse


@pytest.mark.parametrize("value", ["text", " x\n", "0", ["a"], [{"role": "user", "content": "hi"}], [None]])
def test_texts_and_lists_are_documents(value):
    assert is_document(value)


@pytest.mark.parametrize(
    ("value", "reason"),
    [("", "empty"), (" \r\n\t\u2003", "empty"), ([], "empty"), (None, "empty"), (7, "wrong type"), (0.5, "wrong type"),
     (True, "wrong type"), ({"a": "b"}, "wrong type"), (b"text", "wrong type")],
)  # fmt: skip
def test_anything_else_is_refused_with_the_reason_and_the_field(value, reason):
    assert not is_document(value)
    found, detail = refuse(value, "body")
    assert found == reason
    assert "'body'" in detail
