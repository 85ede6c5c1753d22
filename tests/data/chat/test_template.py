import copy
import itertools
import json
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.chat_helpers import assistant, reasonings, texts, user
from zaya_jax.data.chat.conversation import ROLES, find_special, parse_conversation
from zaya_jax.data.chat.template import (
    DEFAULT_TEMPLATE,
    Piece,
    Span,
    Template,
    encode_pieces,
    load_template,
)
from zaya_jax.errors import InputError

turns = st.one_of(
    st.fixed_dictionaries({"role": st.sampled_from([role for role in ROLES if role != "assistant"]), "content": texts}),
    st.fixed_dictionaries({"role": st.just("assistant"), "content": texts}, optional={"reasoning": reasonings}),
)
conversations = st.lists(turns, max_size=5).flatmap(
    lambda messages: texts.map(lambda text: [*messages, {"role": "assistant", "content": text}])
)


@pytest.fixture(scope="module")
def default():
    return load_template(None)


def rendered(template, conversation):
    return template.render(conversation, bos="<s>", eos="</s>")


def joined(pieces):
    return "".join(piece.text for piece in pieces)


def of_reasoning(pieces):
    return [(piece.reasoning, piece.text) for piece in pieces if piece.reasoning is not None]


def chatml(conversation):
    """What the built-in template writes, told once more without Jinja."""
    yield Piece("<s>", False, None)
    for number, message in enumerate(conversation):
        yield Piece(f"<|im_start|>{message['role']}\n", False, None)
        answers = message["role"] == "assistant"
        if reasoning := answers and message.get("reasoning"):
            before, after = reasoning.split(reasoning.strip(), 1)
            yield Piece(f"<think>\n{before}", True, None)
            yield Piece(reasoning.strip(), True, number)
            yield Piece(f"{after}\n</think>\n\n", True, None)
        yield Piece(f"{message['content']}<|im_end|>", answers, None)
        yield Piece("\n", False, None)


def merged(pieces):
    return [(joined(run), *kind) for kind, run in itertools.groupby(pieces, lambda piece: piece[1:])]


@settings(max_examples=50)
@given(conversation=conversations)
def test_the_built_in_template_writes_chatml_and_marks_every_part(default, conversation):
    before = copy.deepcopy(conversation)
    pieces = rendered(default, conversation)
    assert merged(pieces) == [run for run in merged(chatml(conversation)) if run[0]]
    assert all(piece.text for piece in pieces)
    assert conversation == before


@settings(max_examples=40)
@given(st.lists(st.builds(Piece, st.text(min_size=1), st.booleans(), st.sampled_from([None, 1, 2]))))
def test_spans_are_the_maximal_runs_of_pieces(pieces):
    spans = encode_pieces(pieces, lambda text: (list(text), [(i, i + 1) for i in range(len(text))]))
    assert [("".join(span.tokens), *span[1:]) for span in spans] == merged(pieces)
    assert all(left[1:] != right[1:] for left, right in itertools.pairwise(spans))


def test_a_token_on_two_pieces_is_generated_and_of_no_reasoning():
    pieces = [Piece("ask", False, None), Piece("r1", True, 1), Piece(".", True, None), Piece("end", False, None)]
    tokens = {(0, 2): 0, (2, 4): 1, (4, 5): 2, (5, 7): 3, (7, 9): 4}  # as | kr | 1 | .e | nd
    assert encode_pieces(pieces, lambda text: (list(tokens.values()), list(tokens))) == [
        Span([0], False, None),
        Span([1], True, None),
        Span([2], True, 1),
        Span([3], True, None),
        Span([4], False, None),
    ]


LIKE_OTHERS = {
    "strips": ("{{ (message.reasoning or '') | trim }}", lambda text: text.strip()),
    "the other name": ("{% if message.reasoning_content is string %}{{ message.reasoning_content.strip('\\n') }}"
                       "{% endif %}", lambda text: text.strip("\n")),
    "by key": ("{{ message['reasoning'] | default('') }}", lambda text: text),
    "in JSON and a variable": ("{% set r = {'r': message.reasoning or ''} | tojson %}{{ r }}", None),
    "a macro": ("{% macro m(x) %}[{{ x.reasoning }}]{% endmacro %}{{ m(message) }}", lambda text: f"[{text}]"),
}  # fmt: skip


@pytest.mark.parametrize("name", LIKE_OTHERS)
@settings(max_examples=40)
@given(reasoning=reasonings, content=texts)
def test_reasoning_is_found_wherever_a_template_puts_it_and_however_it_strips(name, reasoning, content):
    how, written = LIKE_OTHERS[name]
    source = "{% for message in messages %}<think>{% generation %}" + how + "{{ message.content }}{% endgeneration %}"
    template = Template(source + "{% endfor %}", name)
    if name == "in JSON and a variable":
        reasoning = "".join(c for c in reasoning if c.isalnum()) or "x"  # what JSON writes as it is
        written = '{{"r": "{}"}}'.format
    pieces = rendered(template, [user(""), assistant(content, reasoning=reasoning)])
    empty = {"in JSON and a variable": '{"r": ""}', "a macro": "[]"}.get(name, "")
    assert joined(pieces) == f"<think>{empty}<think>{written(reasoning)}{content}"
    assert of_reasoning(pieces) == [(1, reasoning.strip())]
    assert joined(piece for piece in pieces if not piece.generated) == "<think><think>"


def test_generation_may_be_written_through_variables_and_filters():
    source = (
        "{% for message in messages %}{% set text %}<{% generation %}{{ message.content }}{% endgeneration %}>"
        "{% endset %}{{ loop.index }}{{ text | trim }}{% if loop.last %}{% break %}{% endif %}{% endfor %}"
    )
    pieces = rendered(Template(source, "x"), [user("q"), assistant("a")])
    assert [piece[:2] for piece in pieces] == [
        ("1<", False), ("q", True), (">2<", False), ("a", True), (">", False),
    ]  # fmt: skip


def test_templates_see_the_names_of_transformers_and_text_stays_as_it_is():
    source = "{{ bos_token }}{{ eos_token }}{{ unk_token }}{{ cls_token is defined }}{{ documents is none }}"
    call = {"function": {"name": "f", "arguments": {"a": "<b>"}}}
    messages = [assistant("<é&'>", tool_calls=[call])]
    source += "{{ add_generation_prompt }}{% generation %}{{ messages | tojson }}{% endgeneration %}"
    template = Template(source, "x")
    text = joined(template.render(messages, bos="<s>", eos="</s>", others={"unk_token": "<unk>"}))
    assert text == "<s></s><unk>FalseTrueFalse" + json.dumps(messages, ensure_ascii=False)


SUM = [{"role": "system", "content": "Add."}, user("2 + 3?"), assistant(None, tool_calls=[{"function": {
    "name": "add", "arguments": {"a": 2, "b": 5}}}]), {"role": "tool", "content": "5"},
    assistant("It is 5.", reasoning="2 + 3 is 5."), user("Add."), assistant("Add.", reasoning="5")]  # fmt: skip
# What a template writes of each message, in parts; some contents are parts of others.
PARTS = {
    "content": "{{ message.content or '' }}",
    "reasoning": "{{ message.reasoning or '' }}",
    "tool_calls": "{{ message.tool_calls | tojson if message.tool_calls else '' }}",
}


def template_of(parts, outside=(), unless="false"):
    """A template that leaves out messages for which `unless` is true, and writes the parts `outside` of the loss."""
    inside = "".join(PARTS[part] for part in parts if part not in outside)
    around = "".join(PARTS[part] for part in outside)
    source = ("{% for message in messages %}{% if not (" + unless + ") %}<{{ message.role }}>"
              "{% if message.role == 'assistant' %}" + around + "{% generation %}" + inside + "{% endgeneration %}"
              "{% else %}{{ message.content }}{% endif %}{% endif %}{% endfor %}")  # fmt: skip
    return Template(source, "x")


def test_a_template_may_write_parts_in_any_order_and_leave_out_reasoning_of_earlier_answers():
    for order in itertools.permutations(PARTS):
        pieces = rendered(template_of(order), SUM)
        assert "It is 5." in "".join(piece.text for piece in pieces if piece.generated)
    last = PARTS | {"reasoning": "{{ message.reasoning if loop.last else '' }}"}
    pieces = rendered(Template("{% for message in messages %}{% generation %}" + "".join(last.values())
                               + "{% endgeneration %}{% endfor %}", "x"), SUM)  # fmt: skip
    assert of_reasoning(pieces) == [(6, "5")]


@pytest.mark.parametrize("number", range(len(SUM)))
def test_every_content_must_be_written_also_if_it_is_part_of_another_text(number):
    part = "tool_calls" if SUM[number]["content"] is None else "content"
    with pytest.raises(ValueError, match=f"^the chat template does not write the {part} of message {number + 1}$"):
        rendered(template_of(PARTS, unless=f"loop.index0 == {number}"), SUM)


@pytest.mark.parametrize("more", [{"role": "user", "content": "more"}, {"weight": 0}])
def test_a_template_may_leave_out_reasoning_that_is_not_of_a_trained_last_answer(more):
    answer = {"role": "assistant", "content": "5", "reasoning": "count"}
    conversation = [user(), {"role": "assistant", "content": "4"}, user()]
    conversation += [answer, more] if "role" in more else [answer | more]
    pieces = rendered(template_of([each for each in PARTS if each != "reasoning"]), parse_conversation(conversation))
    assert "5" in joined(pieces)
    assert not of_reasoning(pieces)


@pytest.mark.parametrize("part", PARTS)
def test_a_part_that_is_not_written_or_not_trained_is_refused(part):
    number = {"content": 5, "reasoning": 7, "tool_calls": 3}[part]
    with pytest.raises(ValueError, match=f"^the chat template does not write the {part} of message {number}$"):
        rendered(template_of([each for each in PARTS if each != part]), SUM)
    number = {"reasoning": 5}.get(part, number)
    match = rf"^the chat template writes the {part} of message {number} outside of {{% generation %}}, .* weight of 0$"
    with pytest.raises(ValueError, match=match):
        rendered(template_of(PARTS, outside=[part]), SUM)


def test_only_the_last_answer_is_trained_if_the_others_have_no_weight():
    conversation = [user(), assistant("a", weight=0), user(), assistant("b")]
    mark = "{% if loop.last %}{% generation %}{{ message.content }}{% endgeneration %}{% else %}{{ message.content }}"
    template = Template("{% for message in messages %}" + mark + "{% endif %}{% endfor %}", "x")
    assert [piece.text for piece in rendered(template, conversation) if piece.generated] == ["b"]
    with pytest.raises(ValueError, match=r"content of message 2 outside of {% generation %}"):
        rendered(template, [user(), assistant("a"), user(), assistant("b")])


HOW = ["| trim", "| tojson", "| tojson(ensure_ascii=true)", "| upper", ".split('</think>')[-1]"]


@pytest.mark.parametrize("how", HOW)
def test_templates_may_transform_what_they_write(how):
    calls = [{"function": {"name": "f", "arguments": {}}}]
    conversation = [user(" é "), assistant("<think>\n\n</think>\n\nß", tool_calls=calls)]
    source = "{% for message in messages %}{% generation %}{{ message.content " + how + " }}{{ message.tool_calls "
    assert rendered(
        Template(source + "| tojson if message.tool_calls }}{% endgeneration %}{% endfor %}", "x"), conversation
    )


def test_a_content_of_which_a_template_writes_a_piece_is_refused():
    for how in (".split('</think>')[-1]", "[:3]", "[3:]"):
        source = "{% for message in messages %}{% generation %}{{ message.content" + how + " }}"
        template = Template(source + "{% endgeneration %}{% endfor %}", "x")
        with pytest.raises(ValueError, match="does not write the content of message 2"):
            rendered(template, [user(""), assistant("before </think> after")])


GENERATION = "{% generation %}{{ messages[0].content }}{% endgeneration %}"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('roles must alternate.') }}", "fails: roles must alternate$"),
        ("{{ raise_exception('x\\ud900y') }}", "fails: xy$"),
        ("{{ messages.missing.more }}", "fails: .* has no attribute 'missing'$"),
        ("{{ 1 + '1' }}", "fails: unsupported operand"),
        ("{{ 1 / 0 }}", "fails: division by zero$"),
        ("{{ ''.__class__ }}{{ ''.__class__.__mro__ }}", "fails: access to attribute '__class__'"),
        ("{{ messages.append(1) }}", "fails: access to attribute 'append'"),
        ("{{ messages[0].update(role='x') }}", "fails: access to attribute 'update'"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "fails: Range too big"),
        ("{% include '/etc/hostname' %}", "fails: no loader"),
        ("{{ strftime_now('%Y') }}", "fails: 'strftime_now' is undefined$"),
        ("{{ messages[0].reasoning | length }}", "output it unmodified"),
        ("{{ messages[0].reasoning[:3] }}", "output it unmodified"),
        ("{% set x %}" + GENERATION + "{% endset %}{{ x | length }}", "output it unmodified"),
        (
            "{% macro m() %}" + GENERATION + "{% endmacro %}{% generation %}{{ m() }}{% endgeneration %}",
            "nests generation",
        ),
        ("{{ '\\ud900' }}", "unpaired surrogate"),
    ],
)
def test_a_template_that_fails_with_a_conversation_says_why(source, reason):
    conversation = [assistant("abc", reasoning="because")]
    with pytest.raises(ValueError, match=reason) as raised:
        rendered(Template(source + GENERATION, "x"), conversation)
    assert not isinstance(raised.value, InputError)
    assert conversation == [assistant("abc", reasoning="because")]


def test_a_conversation_too_deep_to_copy_is_refused(default):
    deep = []
    for _ in range(100_000):
        deep = [deep]
    conversation = parse_conversation([assistant("a", extra=deep)])
    assert find_special(conversation, frozenset(["<s>"])) is None
    with pytest.raises(ValueError, match="recursion"):
        rendered(default, conversation)
    while deep:  # or Python's own clean-up recurses
        deep = deep.pop()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("\n{% if %}", r"^The chat template a\.jinja has an error in line 2: .*\.$"),
        ("{{ x | nonsense }}" + GENERATION, "has an error in line 1: No filter named 'nonsense'"),
        ("{{ [1] | random }}" + GENERATION, "No filter named 'random'"),
        (
            "{% generation %}\n" + GENERATION + "{% endgeneration %}",
            "error in line 1: generation blocks must not be nested",
        ),
        (
            "{% generation %}{% if true %}" + GENERATION + "{% endif %}{% endgeneration %}",
            "generation blocks must not be nested",
        ),
        ("{% generation %}", "error in line 1: Unexpected end of template"),
        ("{% break %}" + GENERATION, r"a\.jinja cannot be compiled: 'break' outside loop"),
        ("{{ messages }}", "does not mark assistant turns"),
        ("{# {% generation %}{% endgeneration %} #}", "does not mark assistant turns"),
    ],
)
def test_a_source_that_cannot_be_used_is_named(source, message):
    with pytest.raises(InputError, match=message):
        Template(source, "a.jinja")


def test_a_template_comes_from_a_file_and_travels_to_other_processes(tmp_path):
    path = tmp_path / "chat.jinja"
    path.write_text(GENERATION + "é", encoding="utf-8")
    template = load_template(str(path))
    other = pickle.loads(pickle.dumps(template))  # noqa: S301
    assert (
        rendered(template, [assistant()])
        == rendered(other, [assistant()])
        == [("answer", True, None), ("é", False, None)]
    )
    assert (other.name, other.source, other.digest) == (str(path), GENERATION + "é", template.digest)
    assert len({template.digest, Template(GENERATION, "x").digest, Template(DEFAULT_TEMPLATE, "x").digest}) == 3
    assert Template(GENERATION, "x").digest == Template(GENERATION, "y").digest
    with pytest.raises(InputError, match=r"The chat template .*missing\.jinja cannot be read: .*\.$"):
        load_template(str(tmp_path / "missing.jinja"))
    path.write_bytes(b"\xff")
    with pytest.raises(InputError, match=r"chat\.jinja cannot be read: the byte at offset 0 is not UTF-8"):
        load_template(str(path))


@pytest.mark.parametrize("key", ["weight", "train", "training", "loss", "trainable", "loss_mask"])
@pytest.mark.parametrize("off", [0, False, 0.0])
def test_an_answer_that_is_not_to_be_trained_is_outside_of_the_loss(key, off):
    answers = [{"role": "assistant", "content": text, key: weight} for text, weight in (("bad", off), ("good", 1))]
    conversation = parse_conversation([user(), answers[0], user(), answers[1], {**answers[0], "content": "worse"}])
    pieces = Template(DEFAULT_TEMPLATE, "x").render(conversation, bos=None, eos=None)
    assert "".join(piece.text for piece in pieces if piece.generated) == "good<|im_end|>"
    source = "{% generation %}{% for message in messages %}{{ message.content }}{% endfor %}{% endgeneration %}"
    with pytest.raises(ValueError, match=r"several answers, so that those of weight 0 cannot be told$"):
        Template(source, "x").render(conversation, bos=None, eos=None)


CALLS = [user(), {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}]


@pytest.mark.parametrize("writes", [True, False])
def test_calls_of_tools_are_written_as_the_template_does_or_refused(writes):
    calls = "{{ message.tool_calls }}" if writes else ""
    source = "{% for message in messages %}{% generation %}{{ message.content }}" + calls + "{% endgeneration %}|"
    template = Template(source + "{% endfor %}", "x")
    conversation = parse_conversation(CALLS)
    if writes:
        call = {"type": "function", "function": {"name": "f", "arguments": {}}}
        assert joined(rendered(template, conversation)) == f"question|None{[call]}|"
    else:
        with pytest.raises(ValueError, match=r"^the chat template does not write the tool_calls"):
            rendered(template, conversation)
