"""Trim conversations that are too long, by cutting the end of their reasoning and never an answer.

ZAYA1 keeps the start of a chain of thought because it plans and takes the problem apart, while the end consolidates
(docs/reference.md §6.1; arXiv 2605.05365, section III-A). The report does not say which tokens count toward the limit;
here all do, including those of the template.
"""

from collections.abc import Callable, Sequence
from typing import Literal

from zaya_jax.data.chat.conversation import Conversation
from zaya_jax.data.chat.template import Span

Outcome = Literal["kept", "reasoning_cut", "earlier_removed", "dropped"]


def trim(
    conversation: Conversation, limit: int, render: Callable[[Conversation], list[Span]]
) -> tuple[list[Span] | None, Outcome]:
    """Trim a conversation to at most `limit` tokens without shortening an answer; also return the outcome.

    Uses the first of these that fits, or returns None:

    1. the whole conversation ("kept");
    2. the reasoning of the last turn cut at its end, by exactly the excess tokens ("reasoning_cut");
    3. earlier turns without reasoning, and the last turn's whole or cut as in 2 ("earlier_removed");
    4. no reasoning at all, nor the marks around it ("earlier_removed" if earlier turns had some, otherwise
       "reasoning_cut").

    A cut falls between two tokens, so with byte-level tokens it can split a character. `render` returns spans that
    identify reasoning, see `encode_pieces`; it is called at most three times.
    """
    spans = render(conversation)
    if _total(spans) <= limit:
        return spans, "kept"
    last = max(number for number, message in enumerate(conversation) if message["role"] == "assistant")
    if (cut := _cut(spans, last, limit)) is not None:
        return cut, "reasoning_cut"
    written = {span.reasoning for span in spans if span.reasoning is not None}
    earlier = written - {last}
    if earlier:
        spans = render(_without(conversation, earlier))
        fitting = spans if _total(spans) <= limit else _cut(spans, last, limit)
        if fitting is not None:
            return fitting, "earlier_removed"
    if last in written:
        spans = render(_without(conversation, written))
        if _total(spans) <= limit:
            return spans, "earlier_removed" if earlier else "reasoning_cut"
    return None, "dropped"


def _total(spans: Sequence[Span]) -> int:
    return sum(len(span.tokens) for span in spans)


def _cut(spans: list[Span], last: int, limit: int) -> list[Span] | None:
    """Cut the reasoning of message `last` so that exactly `limit` tokens remain; None if it is too short for that."""
    excess = _total(spans) - limit
    place = max((place for place, span in enumerate(spans) if span.reasoning == last), default=None)
    if place is None or len(spans[place].tokens) < excess:
        return None
    span = spans[place]
    shorter = span._replace(tokens=span.tokens[: len(span.tokens) - excess])
    return [*spans[:place], shorter, *spans[place + 1 :]]


def _without(conversation: Conversation, numbers: set[int]) -> Conversation:
    shortened = [{key: value for key, value in message.items() if key != "reasoning"} for message in conversation]
    return [shortened[n] if n in numbers else message for n, message in enumerate(conversation)]
