import copy
import itertools
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from zaya_jax.data.chat.template import Span, encode_pieces, load_template
from zaya_jax.data.chat.trimming import trim

TEMPLATE = load_template(None)

# A token is one or two characters, so that its count is no length of a text.
texts = st.text("ab \n", max_size=7)
reasonings = st.text("xy", min_size=1, max_size=9)
exchanges = st.tuples(
    st.fixed_dictionaries({"role": st.just("user"), "content": texts}),
    st.fixed_dictionaries({"role": st.just("assistant"), "content": texts}, optional={"reasoning": reasonings}),
)
conversations = st.builds(
    lambda head, turns, tail: [*head, *itertools.chain(*turns), *tail],
    st.lists(st.fixed_dictionaries({"role": st.just("system"), "content": texts}), max_size=1),
    st.lists(exchanges, min_size=1, max_size=3),
    st.lists(st.fixed_dictionaries({"role": st.just("user"), "content": texts}), max_size=1),
)


def encode(text):
    """A token for each character."""
    return list(text), [(i, i + 1) for i in range(len(text))]


def render(conversation):
    return encode_pieces(TEMPLATE.render(conversation, bos="<s>", eos=""), encode)


def joined(spans):
    return [token for span in spans for token in span.tokens]


def masked(spans):
    return [(character, span.generated) for span in spans for token in span.tokens for character in token]


def answering(conversation):
    return [number for number, message in enumerate(conversation) if message["role"] == "assistant"]


def by_hand(conversation):
    """ChatML as lists of tokens, one for each span and with the message whose reasoning it is."""
    spans = [["<s>", None]]
    for number, message in enumerate(conversation):
        spans[-1][0] += f"<|im_start|>{message['role']}\n"
        if message["role"] == "assistant":
            spans.append(["", None])
            if "reasoning" in message:
                spans[-1][0] += "<think>\n"
                spans += [[message["reasoning"], number], ["\n</think>\n\n", None]]
            spans[-1][0] += f"{message['content']}<|im_end|>"
            spans.append(["\n", None])
        else:
            spans[-1][0] += f"{message['content']}<|im_end|>\n"
    return [(list(text), number) for text, number in spans]


def choices(conversation):
    """All that may be done, the best first: what it is called, and the tokens."""
    last = answering(conversation)[-1]
    earlier = [{**message} for message in conversation]
    for message in earlier[:last]:
        message.pop("reasoning", None)
    neither = [{key: value for key, value in message.items() if key != "reasoning"} for message in conversation]
    many = earlier != conversation
    for form, complete, shortened in [
        (conversation, "kept", "reasoning_cut"),
        *([(earlier, "earlier_removed", "earlier_removed")] if many else []),
    ]:
        spans = by_hand(form)
        yield complete, [token for tokens, _ in spans for token in tokens]
        for size in reversed(range(len(form[last].get("reasoning", "")))):
            cut = [tokens[:size] if number == last else tokens for tokens, number in spans]
            yield shortened, [token for tokens in cut for token in tokens]
    if neither != earlier:
        name = "earlier_removed" if many else "reasoning_cut"
        yield name, [token for tokens, _ in by_hand(neither) for token in tokens]


def is_subsequence(part, complete):
    rest = iter(complete)
    return all(token in rest for token in part)


def test_trimming_takes_the_first_choice_that_fits_for_every_limit():
    seen = Counter()

    @settings(max_examples=30)
    @given(conversations)
    def check(conversation):
        possible = list(choices(conversation))
        forms = {}  # rendered once for all limits

        def rendered(form):
            key = repr(form)
            if key not in forms:
                forms[key] = render(form)
            return forms[key]

        for limit in range(len(possible[0][1]) + 2):
            outcome, tokens = next(((o, t) for o, t in possible if len(t) <= limit), ("dropped", None))
            before = copy.deepcopy(conversation)
            spans, actual = trim(conversation, limit, rendered)
            assert (actual, spans and joined(spans)) == (outcome, tokens)
            assert conversation == before
            # Nothing changes its place or side of the mask. By characters: a turn without its marks has other tokens.
            assert is_subsequence(masked(spans or []), masked(rendered(conversation)))
            seen[outcome] += 1

    check()
    assert set(seen) == {"kept", "reasoning_cut", "earlier_removed", "dropped"}
    assert min(seen.values()) > 50


def test_a_conversation_is_rendered_no_more_often_than_needed():
    def count(conversation, limit):
        calls = []
        outcome = trim(conversation, limit, lambda form: calls.append(1) or render(form))[1]
        return outcome, len(calls)

    plain = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    thought = [plain[0], {**plain[1], "reasoning": "x" * 40}]
    both = [*thought, *thought]
    size = {name: len(joined(render(c))) for name, c in {"plain": plain, "thought": thought, "both": both}.items()}
    assert count(plain, size["plain"]) == ("kept", 1)
    assert count(plain, size["plain"] - 1) == ("dropped", 1)
    assert count(thought, size["thought"] - 20) == ("reasoning_cut", 1)
    assert count(thought, size["plain"]) == ("reasoning_cut", 2)
    assert count(thought, 3) == ("dropped", 2)
    assert count(both, size["both"] - 20) == ("reasoning_cut", 1)
    assert count(both, size["both"] - 41) == ("earlier_removed", 2)
    assert count(both, 3) == ("dropped", 3)


def test_reasoning_written_twice_is_cut_right_before_the_answer():
    twice = [Span("abc", True, 0), Span("|", True, None), Span("abc", True, 0), Span("answer", True, None)]
    spans, outcome = trim([{"role": "assistant", "content": "answer", "reasoning": "abc"}], 11, lambda _: twice)
    assert ("".join(joined(spans)), outcome) == ("abc|aanswer", "reasoning_cut")
