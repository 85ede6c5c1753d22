"""Render conversations to text and tokens, marking the assistant's parts and reasoning."""

import hashlib
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from zaya_jax.data.template_runner import run_template
from zaya_jax.errors import InputError
from zaya_jax.run.files import require_regular

Conversation = list[dict[str, Any]]

ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT = {"system": "system", "human": "user", "gpt": "assistant"}  # `from` of a message → role
# ChatML. Jinja removes the newline after a block, hence the last `{{ '\n' }}`. Content that would be lost is rejected.
DEFAULT_TEMPLATE = r"""{{ bos_token }}{% for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.tool_calls %}
{{ raise_exception('the built-in chat template has no place for tool_calls') }}
{% endif %}
{% if message.role == 'assistant' %}
{% generation %}
{% if message.reasoning %}
<think>
{{ message.reasoning }}
</think>

{% endif %}
{{ message.content }}<|im_end|>{% endgeneration %}
{% else %}
{{ message.content }}<|im_end|>
{%- endif %}
{{ '\n' }}
{%- endfor %}
"""

# Markers in a rendering: unpaired surrogates, which valid text cannot contain.
_GENERATION, _GENERATION_END = "\ud800", "\ud801"
_REASONING, _REASONING_BEGIN, _REASONING_END = "\ud802", "\ud803", "\ud804"  # the message's number, the text
_MARK = re.compile(f"[{_GENERATION}{_GENERATION_END}{_REASONING_END}]|{_REASONING}([0-9]+){_REASONING_BEGIN}")
_HALF_OF_PAIR = re.compile("[\ud800-\udfff]")
_THINK, _THINK_END = "<think>", "</think>"
_MAX_MESSAGE = 200  # characters of a template's error that messages quote


class Piece(NamedTuple):
    """A piece of a rendered conversation."""

    text: str
    generated: bool  # written by the assistant
    reasoning: int | None  # index of the message whose reasoning this is


Encoded = tuple[Sequence[int], Sequence[tuple[int, int]]]  # token ids, and the character range of each


class Span(NamedTuple):
    """A run of tokens of one kind, see `Piece`."""

    tokens: list[int]
    generated: bool
    reasoning: int | None


def parse_conversation(value: Any) -> Conversation:
    """Validate a conversation and normalize it.

    In the result, each message has a `role` of `ROLES` and a string `content`; an assistant message also has its
    `reasoning`, if any. The input can give reasoning as `reasoning`, `reasoning_content` or `<think>…</think>` at the
    start of the content (white space around both is then stripped). The content can be a list of text parts, and may
    be null or absent in assistant messages that call tools. ShareGPT messages with `from` and `value` work too. Other
    keys are kept.

    Raises:
      ValueError: the value is not a conversation or has no assistant message. The message is a clause; the caller adds
        the location. Messages count from 1.
    """
    if not isinstance(value, list) or not value:
        raise ValueError("a conversation must be a list of at least one message")
    conversation = [_parse_message(message, f"message {number}") for number, message in enumerate(value, 1)]
    if all(message["role"] != "assistant" for message in conversation):
        raise ValueError("the conversation has no assistant message")
    return conversation


def _parse_message(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is not an object with a role and a content")
    if "role" not in value and "from" in value:
        value = _from_sharegpt(value, where)
    role = value.get("role")
    if not isinstance(role, str):
        raise ValueError(f"{where} has no role")
    if role not in ROLES:
        raise ValueError(f"{where} has the role {role!r:.50}, which is not one of {', '.join(ROLES)}")
    if any(_HALF_OF_PAIR.search(text) for text in _strings(value)):
        raise ValueError(f"{where} contains an unpaired surrogate")
    message = dict(value)
    if "content" in value or role != "assistant" or not value.get("tool_calls"):
        message["content"] = _content(value, where)
    if role != "assistant":
        return message
    reasoning = _reasoning(message, where)
    if not reasoning and (content := message.get("content")):
        reasoning, message["content"] = _split(content, where)
    return {**message, "reasoning": reasoning} if reasoning else message


def _from_sharegpt(message: dict[str, Any], where: str) -> dict[str, Any]:
    speaker = message["from"]
    if not isinstance(speaker, str) or speaker not in SHAREGPT:
        raise ValueError(f"{where} is from {speaker!r:.50}, which is not one of {', '.join(SHAREGPT)}")
    rest = {key: value for key, value in message.items() if key not in ("from", "value")}
    return {**rest, "role": SHAREGPT[speaker], "content": message.get("value")}


def _content(message: dict[str, Any], where: str) -> str | None:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None and message["role"] == "assistant" and message.get("tool_calls"):
        return None  # as transformers passes it to the template
    if not isinstance(content, list):
        raise ValueError(f"{where} has a content that is neither a string nor a list of text parts")
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f"{where} has a content part that is not text")
    return "".join(part["text"] for part in content)


def _reasoning(message: dict[str, Any], where: str) -> str:
    """Remove the reasoning from a message and return it; empty if there is none."""
    texts = [text for key in ("reasoning", "reasoning_content") if (text := message.pop(key, None)) is not None]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{where} has a reasoning that is not a string")
    texts = [text for text in texts if text.strip()]
    if len(set(texts)) > 1:
        raise ValueError(f"{where} has a reasoning and a reasoning_content that differ")
    return texts[0] if texts else ""


def _split(content: str, where: str) -> tuple[str, str]:
    """Split a content into reasoning and answer."""
    if not content.lstrip().startswith(_THINK):
        return "", content
    reasoning, end, answer = content.lstrip().removeprefix(_THINK).partition(_THINK_END)
    if not end:
        raise ValueError(f"{where} has a {_THINK} without {_THINK_END}")
    return reasoning.strip(), answer.strip()


def _strings(value: Any) -> Iterator[str]:
    """Yield every string in a JSON value in order, keys included."""
    rest = [value]  # not recursive, because a hostile file can be nested deeply
    while rest:
        item = rest.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict):
            rest.extend(part for pair in reversed(item.items()) for part in reversed(pair))
        elif isinstance(item, list):
            rest.extend(reversed(item))


def find_special(conversation: Conversation, specials: frozenset[str]) -> str | None:
    """Return the first text of a special token in any string of the conversation, or None.

    Renderings are encoded with special tokens enabled, so such text would become a token and could end a turn.
    """
    pattern = _alternatives(specials)
    for text in _strings(conversation) if specials else ():
        if match := pattern.search(text):
            return match.group()
    return None


@lru_cache(maxsize=4)
def _alternatives(texts: frozenset[str]) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(text) for text in sorted(texts, key=lambda text: (-len(text), text))))


class Template:
    """A Jinja chat template, compatible with transformers.

    The template must mark what the assistant writes with `{% generation %}` and `{% endgeneration %}`. It receives
    `messages` (reasoning both as `reasoning` and `reasoning_content`), `bos_token`, `eos_token`,
    `add_generation_prompt` (false) and `raise_exception`. It runs in Jinja's sandbox with limited time and memory,
    without access to files, the clock or random numbers.

    Attributes:
      name: for messages.
      source: the template's text.
      digest: of the source, hexadecimal.
    """

    def __init__(self, source: str, name: str) -> None:
        """Compile the source.

        Raises:
          InputError: the source has an error or no generation block.
        """
        self.source = source
        self.name = name
        self.digest = hashlib.blake2b(source.encode(), digest_size=16).hexdigest()
        answer = run_template(source, [])
        if "syntax" in answer:
            raise InputError(f"The chat template {name} has an error in line {answer['line']}: "
                             f"{_shorten(answer['syntax'])}.")  # fmt: skip
        if "texts" not in answer:
            message = _shorten(answer.get("compile") or answer["render"])
            raise InputError(f"The chat template {name} cannot be compiled: {message}.")
        if not answer["has_generation"]:
            raise InputError(
                f"The chat template {name} does not mark assistant turns; put what the assistant writes between "
                "{% generation %} and {% endgeneration %}."
            )

    def render(self, conversation: Conversation, *, bos: str | None, eos: str | None) -> list[Piece]:
        """Render a conversation from `parse_conversation`.

        Markers are placed inside the white space around reasoning, so a template can strip it. A second rendering
        without markers verifies that they changed nothing.

        Args:
          conversation: not modified.
          bos: text of `bos_token`; None leaves it undefined, as in transformers.
          eos: text of `eos_token`, likewise.

        Returns:
          Non-empty pieces whose concatenated text is the rendering.

        Raises:
          ValueError: the template fails on this conversation, nests generation blocks, alters reasoning, or omits tool
            calls. The message is a clause; the caller adds the location.
        """
        tokens = {"bos_token": bos, "eos_token": eos}
        names = {name: text for name, text in tokens.items() if text is not None} | {"add_generation_prompt": False}
        plain, marked = self._run(_request(conversation, names), _request(conversation, names, marked=True))
        if _HALF_OF_PAIR.search(plain):
            raise ValueError("the chat template writes an unpaired surrogate")
        pieces = _cut(marked)
        if "".join(piece.text for piece in pieces) != plain:
            raise ValueError("the chat template changes what the assistant writes; it must output it unmodified")
        if any(message.get("tool_calls") for message in conversation):
            self._check_tool_calls(conversation, names, plain)
        return pieces

    def _check_tool_calls(self, conversation: Conversation, names: dict[str, Any], plain: str) -> None:
        """Raise `ValueError` if the template ignores the tool calls."""
        without = [{key: value for key, value in message.items() if key != "tool_calls"} for message in conversation]
        try:
            [rendering] = self._run(_request(without, names))
        except ValueError:  # a template that requires them does not ignore them
            return
        if rendering == plain:
            raise ValueError("the chat template does not write the tool_calls of the conversation")

    def _run(self, *renderings: dict[str, Any]) -> list[str]:
        try:
            answer = run_template(self.source, list(renderings))
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"the chat template cannot read the conversation: {_shorten(str(error))}") from error
        if "texts" not in answer:
            [message] = (answer[key] for key in ("render", "compile", "syntax") if key in answer)
            raise ValueError(f"the chat template fails: {_shorten(message)}")
        return answer["texts"]


def load_template(path: str | None) -> Template:
    """Load a chat template from a file; None selects the built-in one.

    Raises:
      InputError: the file is missing or not UTF-8, or see `Template`.
    """
    if path is None:
        return Template(DEFAULT_TEMPLATE, "built in")
    try:
        require_regular(Path(path))
        source = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"The chat template {path} cannot be read: {error}.") from error
    return Template(source, path)


def encode_pieces(pieces: Sequence[Piece], encode: Callable[[str], Encoded]) -> list[Span]:
    """Encode a rendering as a whole, as transformers does, and assign each token to its pieces.

    A token that spans several pieces counts as generated if its first or last piece is, and as reasoning only if both
    are, so that trimming reasoning never removes other text.

    Args:
      pieces: from `Template.render`.
      encode: text → token ids and their character ranges; special tokens enabled, none added.

    Returns:
      Maximal runs of tokens of the same kind.
    """
    tokens, places = encode("".join(piece.text for piece in pieces))
    ends = np.cumsum([len(piece.text) for piece in pieces])
    starts, stops = np.array(places, np.int64).reshape(-1, 2).T
    firsts = np.searchsorted(ends[:-1], starts, side="right")
    lasts = np.searchsorted(ends[:-1], np.maximum(stops - 1, starts), side="right")
    spans: list[Span] = []
    for token, first, last in zip(tokens, firsts.tolist(), lasts.tolist(), strict=True):
        left, right = pieces[first], pieces[last]
        kind = left.generated or right.generated, left.reasoning if left.reasoning == right.reasoning else None
        if spans and spans[-1][1:] == kind:
            spans[-1].tokens.append(token)
        else:
            spans.append(Span([token], *kind))
    return spans


def _shorten(message: str) -> str:
    printable = _HALF_OF_PAIR.sub("", message)
    return textwrap.shorten(printable, _MAX_MESSAGE, placeholder=" …").rstrip(".")


def _request(conversation: Conversation, names: dict[str, Any], *, marked: bool = False) -> dict[str, Any]:
    """Build a rendering request for `run_template` from copies of the messages."""
    messages = [dict(message) for message in conversation]
    for number, message in enumerate(messages):
        if message["role"] == "assistant" and message.get("reasoning"):
            reasoning = _mark(message["reasoning"], number) if marked else message["reasoning"]
            message["reasoning"] = message["reasoning_content"] = reasoning
    marks = [_GENERATION, _GENERATION_END] if marked else ["", ""]
    return {"marks": marks, "names": {"messages": messages, **names}}


def _mark(reasoning: str, number: int) -> str:
    text = reasoning.strip()
    if not text:
        return reasoning
    before, _, after = reasoning.partition(text)
    return f"{before}{_REASONING}{number}{_REASONING_BEGIN}{text}{_REASONING_END}{after}"


def _cut(marked: str) -> list[Piece]:
    """Split a marked rendering into pieces."""
    pieces: list[Piece] = []
    generated, reasoning, start = False, None, 0
    for mark in _MARK.finditer(marked):
        if mark.start() > start:
            pieces.append(Piece(marked[start : mark.start()], generated, reasoning))
        start = mark.end()
        if mark.group() == _GENERATION and generated:
            raise ValueError("the chat template nests generation blocks")
        if mark.group() in (_GENERATION, _GENERATION_END):
            generated = mark.group() == _GENERATION
        else:
            reasoning = None if mark.group() == _REASONING_END else int(mark[1])
    if start < len(marked):
        pieces.append(Piece(marked[start:], generated, reasoning))
    return pieces
