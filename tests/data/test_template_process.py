from zaya_jax.data.template_process import _answer

MESSAGES = [{"content": "a"}, {"content": "b"}]
SOURCE = "{% for message in messages %}{% generation %}{{ message.content }}{% endgeneration %}{% endfor %}"


def ask(source, *marks):
    return _answer({"source": source, "renderings": [{"marks": m, "names": {"messages": MESSAGES}} for m in marks]})


def test_each_rendering_has_its_own_marks():
    assert ask(SOURCE, ["", ""], ["<", ">"]) == {"texts": ["ab", "<a><b>"], "has_generation": True}
    assert ask("{{ messages | length }}", ["<", ">"]) == {"texts": ["2"], "has_generation": False}
    assert ask(SOURCE) == {"texts": [], "has_generation": True}


def test_what_goes_wrong_is_told_apart():
    assert ask("{% if %}", ["", ""]).keys() == {"syntax", "line"}
    assert ask("{% break %}", ["", ""]).keys() == {"compile"}
    assert ask("{{ raise_exception('no') }}", ["", ""]) == {"render": "no"}
    assert ask("{{ raise_exception('no') }}") == {"texts": [], "has_generation": False}
