"""Answer-preserving trimming: a conversation that is too long loses ends of its reasoning, never of an answer.

The head of a chain of thought plans and takes the problem apart, while its tail consolidates (docs/reference.md §6.1;
arXiv 2605.05365, section III-A). The report leaves open how tokens are counted: here all count, the template's too.
"""

from collections.abc import Callable, Sequence
from typing import Literal

from zaya_jax.data.chat import Conversation, Span

Outcome = Literal["kept", "reasoning_cut", "earlier_removed", "dropped"]


def trim(
    conversation: Conversation, limit: int, render: Callable[[Conversation], list[Span]]
) -> tuple[list[Span] | None, Outcome]:
    """Fit a conversation into `limit` tokens with every answer whole.

    The first of these that fits is taken:

    1. all of it ("kept");
    2. the last turn's reasoning cut at its end, by just as many tokens as are too many ("reasoning_cut");
    3. no reasoning in earlier turns, and the last turn's whole or cut as in 2 ("earlier_removed");
    4. no reasoning anywhere, not even the marks around it ("earlier_removed" where earlier turns had some, otherwise
       "reasoning_cut").

    A cut falls between two tokens, which with byte-level tokens may be within a character.

    Args:
      conversation: of `parse_conversation`; stays as it is.
      limit: tokens.
      render: a conversation to spans that name each reasoning they hold, as `encode_pieces` does; called at most
        three times.

    Returns:
      The spans, of `limit` tokens at most, or None where the answers alone are too long; and what was done.
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
    """The spans of exactly `limit` tokens, where the reasoning of message `last` has as many as are too many."""
    excess = _total(spans) - limit
    place = max((place for place, span in enumerate(spans) if span.reasoning == last), default=None)
    if place is None or len(spans[place].tokens) < excess:
        return None
    span = spans[place]
    shorter = span._replace(tokens=span.tokens[: len(span.tokens) - excess])
    return [*spans[:place], shorter, *spans[place + 1 :]]


def _without(conversation: Conversation, numbers: set[int]) -> Conversation:
    """The conversation without the reasoning of some messages."""
    return [
        {key: value for key, value in message.items() if key != "reasoning"} if number in numbers else message
        for number, message in enumerate(conversation)
    ]
