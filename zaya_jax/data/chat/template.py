"""Render conversations to text and tokens, marking the assistant's parts and reasoning."""

import hashlib
import itertools
import operator
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from zaya_jax.data.chat.conversation import HALF_OF_PAIR, REASONING, THINK, THINK_END, Conversation
from zaya_jax.data.chat.template_process import run_template
from zaya_jax.errors import InputError
from zaya_jax.run.files import expanded, read_text, require_regular

# ChatML, with tools as in Hermes and Qwen2.5. Jinja removes the newline after a block, hence the last `{{ '\n' }}`.
DEFAULT_TEMPLATE = (Path(__file__).parent / "default.jinja").read_text(encoding="utf-8")

# Markers in a rendering: unpaired surrogates, which valid text cannot contain.
_GENERATION, _GENERATION_END = "\ud800", "\ud801"
_REASONING, _REASONING_BEGIN, _REASONING_END = "\ud802", "\ud803", "\ud804"  # the message's number, the text
_MARKS = (_GENERATION, _GENERATION_END)
_ABSENT = {"tools": None, "documents": None, "add_generation_prompt": False}
_BLOCKS = re.compile(f"[{_GENERATION}{_GENERATION_END}]")
_REASONINGS = re.compile(f"{_REASONING}([0-9]+){_REASONING_BEGIN}([^{_REASONING_END}]*){_REASONING_END}")
# Before and after what a template must write: digits, which filters such as `tojson` and `upper` leave as they are.
_PART = "7315904826"
_PARTS = re.compile(f"{_PART}([0-9]{{9}})")
_TEXT = re.compile(r"\S(?:.*\S)?", re.DOTALL)  # templates strip the white space around it
_EMPTY_REASONING = re.compile(rf"(?:\s*{THINK}\s*{THINK_END})?")  # as is this at the start of a content
_MAX_MESSAGE = 200  # characters of a template's error that messages quote


class Piece(NamedTuple):
    """A piece of a rendered conversation."""

    text: str
    generated: bool  # written by the assistant
    reasoning: int | None  # index of the message whose reasoning this is


class _Part(NamedTuple):
    """A content, reasoning, call or tool, which a template must write."""

    name: str  # for messages
    trained: bool | None  # None if the assistant does not write it
    optional: bool
    blocks: set[int | None]  # the generation blocks that have it, by index; None outside of them


class Span(NamedTuple):
    """A run of tokens of one kind, see `Piece`."""

    tokens: list[int]
    generated: bool
    reasoning: int | None


class Template:
    """A Jinja chat template, compatible with transformers.

    The template must mark what the assistant writes with `{% generation %}` and `{% endgeneration %}`. It receives
    `messages` (reasoning as `reasoning`, `reasoning_content` and `thinking`), `tools` (or none), `documents` (none),
    `bos_token`, `eos_token` and other special tokens, `add_generation_prompt` (false) and `raise_exception`. It runs in
    Jinja's sandbox with limited time and memory, without access to files, the clock or random numbers.
    """

    def __init__(self, source: str, name: str) -> None:
        """Compile the source; `InputError` if it has an error or no generation block. `name` is for messages."""
        self.source, self.name = source, name
        self.digest = hashlib.blake2b(source.encode(), digest_size=16).hexdigest()
        answer = run_template(source, [])
        if "error" in answer:
            problem = f"has an error in line {answer['line']}" if "line" in answer else "cannot be compiled"
            raise InputError(f"The chat template {name} {problem}: {_shorten(answer['error'])}.")
        if not answer["has_generation"]:
            advice = "put what the assistant writes between {% generation %} and {% endgeneration %}."
            raise InputError(f"The chat template {name} does not mark assistant turns; {advice}")

    def render(
        self,
        conversation: Conversation,
        *,
        bos: str | None,
        eos: str | None,
        tools: list[dict[str, Any]] | None = None,
        others: dict[str, str] | None = None,
    ) -> list[Piece]:
        """Render a conversation from `parse_conversation`, which is not modified, with `tools` from `parse_tools`.

        Markers are placed inside the white space around reasoning, so a template can strip it. A second rendering
        without markers verifies that they changed nothing, and a third with all contents, calls and tools marked that
        the template writes them. `bos` and `eos` are texts, or None to leave the token undefined, as in transformers.

        Return non-empty pieces, whose texts are the rendering; an answer with a `weight` of 0 is not `generated`.
        `ValueError`, as a clause, if the template fails, nests generation blocks, alters reasoning, omits a content, a
        tool, a call or the last answer's reasoning, or writes a part of a trained answer outside of generation blocks.
        """
        tokens = {"bos_token": bos, "eos_token": eos, **(others or {})}
        names = {"tools": tools, **{name: text for name, text in tokens.items() if text is not None}}
        messages, marked_tools, parts = _mark_parts(conversation, tools)
        plain, marked, checked = self._run(
            render_request(conversation, names),
            render_request(_mark_reasoning(conversation), names, _MARKS),
            render_request(messages, names | {"tools": marked_tools}, _MARKS),
        )
        if HALF_OF_PAIR.search(plain):
            raise ValueError("the chat template writes an unpaired surrogate")
        if re.search(f"{_GENERATION}[^{_GENERATION_END}]*{_GENERATION}", marked):
            raise ValueError("the chat template nests generation blocks")
        for number, text in enumerate(_BLOCKS.split(checked)):
            for mark in _PARTS.findall(text):
                for part in parts[int(mark) :][:1]:  # none, if the conversation has such digits itself
                    part.blocks.add(number // 2 if number % 2 else None)
        pieces = _cut(marked, _trained_blocks(parts, marked.count(_GENERATION)))
        if "".join(piece.text for piece in pieces) != plain:
            raise ValueError("the chat template changes what the assistant writes; it must output it unmodified")
        for part in parts:
            if not part.blocks and not part.optional:
                raise ValueError(f"the chat template does not write the {part.name}")
            if part.blocks == {None} and part.trained:
                advice = "where it is not trained; put it inside, or give the message a weight of 0"
                raise ValueError(f"the chat template writes the {part.name} outside of {{% generation %}}, {advice}")
        return pieces

    def _run(self, *renderings: dict[str, Any]) -> list[str]:
        try:
            answer = run_template(self.source, list(renderings))
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"the chat template cannot read the conversation: {_shorten(str(error))}") from error
        if "error" in answer:
            raise ValueError(f"the chat template fails: {_shorten(answer['error'])}")
        return answer["texts"]


def load_template(path: str | None) -> Template:
    """Load a chat template from a file; None selects the built-in one. `InputError` if it cannot be read or used."""
    if path is None:
        return Template(DEFAULT_TEMPLATE, "built in")
    require_regular(expanded(path))
    return Template(read_text(path, "The chat template"), path)


def encode_pieces(
    pieces: Sequence[Piece], encode: Callable[[str], tuple[Sequence[int], Sequence[tuple[int, int]]]]
) -> list[Span]:
    """Encode a rendering as a whole, as transformers does, and return maximal runs of tokens of the same kind.

    A token that spans several pieces counts as generated if its first or last piece is, and as reasoning only if both
    are, so that trimming reasoning never removes other text. `encode` is a `Tokenizer.encode_rendering`.
    """
    tokens, places = encode("".join(piece.text for piece in pieces))
    ends = np.cumsum([len(piece.text) for piece in pieces])
    starts, stops = np.array(places, np.int64).reshape(-1, 2).T
    firsts = np.searchsorted(ends[:-1], starts, side="right")
    lasts = np.searchsorted(ends[:-1], np.maximum(stops - 1, starts), side="right")
    kinds = []
    for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
        left, right = pieces[first], pieces[last]
        reasoning = left.reasoning if left.reasoning == right.reasoning else None
        kinds.append((left.generated or right.generated, reasoning))
    runs = itertools.groupby(zip(tokens, kinds, strict=True), key=operator.itemgetter(1))
    return [Span([token for token, _ in run], *kind) for kind, run in runs]


def _shorten(message: str) -> str:
    printable = HALF_OF_PAIR.sub("", message)
    return textwrap.shorten(printable, _MAX_MESSAGE, placeholder=" …").rstrip(".")


def render_request(messages: Conversation, names: dict[str, Any], marks: Sequence[str] = ("", "")) -> dict[str, Any]:
    """Build a rendering request for `run_template`; like transformers, with the reasoning under all of its names."""
    messages = [m | dict.fromkeys(REASONING, m["reasoning"]) if _reasoning(m) else m for m in messages]
    return {"marks": marks, "names": {"messages": messages, **_ABSENT, **names}}


def _reasoning(message: dict[str, Any]) -> str:
    return message.get("reasoning", "") if message["role"] == "assistant" else ""


def _mark_reasoning(conversation: Conversation) -> Conversation:
    marked = []
    for number, message in enumerate(conversation):
        mark, text = rf"{_REASONING}{number}{_REASONING_BEGIN}\g<0>{_REASONING_END}", _reasoning(message)
        marked.append({**message, "reasoning": _TEXT.sub(mark, text, count=1)} if text else message)
    return marked


def _mark_parts(conversation: Conversation, tools: Any) -> tuple[Conversation, Any, list[_Part]]:
    """Return messages and tools in which the digits `_PART` and a number mark each of the parts."""
    parts: list[_Part] = []

    def mark(name: str, message: dict[str, Any], *, optional: bool = False) -> str:
        trained = message.get("weight") != 0 if message.get("role") == "assistant" else None
        parts.append(_Part(name, trained, optional, set()))
        return f"{_PART}{len(parts) - 1:09}"

    messages = [dict(message) for message in conversation]
    for number, message in enumerate(messages, 1):
        content, calls = message.get("content") or "", message["role"] == "assistant" and message.get("tool_calls")
        if content.strip() or not calls:
            start, end = (mark(f"content of message {number}", message, optional=not content.strip()) for _ in range(2))
            message["content"] = _EMPTY_REASONING.sub(rf"\g<0>{start}", content, count=1) + end
        if reasoning := _reasoning(message):  # templates leave out that of earlier answers
            is_earlier = number < len(messages) or message.get("weight") == 0
            message["reasoning"] = mark(f"reasoning of message {number}", message, optional=is_earlier) + reasoning
        if calls:
            keys = [(call, mark(f"tool_calls of message {number}", message)) for call in calls]
            marked_calls = (_with(call, arguments={**call["function"]["arguments"], key: key}) for call, key in keys)
            message["tool_calls"] = list(marked_calls)
    marked = [_with(tool, name=f"{tool.get('function', tool)['name']}{mark('tools', {})}") for tool in tools or ()]
    return messages, marked or None, parts


def _with(call: dict[str, Any], **keys: Any) -> dict[str, Any]:
    """Return a call or a tool whose function has these keys."""
    return {**call, "function": {**call["function"], **keys}} if "function" in call else {**call, **keys}


def _trained_blocks(parts: list[_Part], count: int) -> list[bool]:
    """Return for each of `count` generation blocks whether the answers in it are trained."""
    if all(part.trained is not False for part in parts):
        return [True] * count
    trained = [{part.trained for part in parts if block in part.blocks} for block in range(count)]
    if any(each not in ({True}, {False}) for each in trained):
        raise ValueError(
            "the chat template has parts between {% generation %} and {% endgeneration %} with none or several "
            "answers, so that those of weight 0 cannot be told"
        )
    return [each == {True} for each in trained]


def _cut(marked: str, trained: Sequence[bool]) -> list[Piece]:
    """Split a marked rendering into pieces; `trained` says for each generation block whether it is generated."""
    pieces: list[Piece] = []
    for number, block in enumerate(_BLOCKS.split(marked)):
        generated = number % 2 == 1 and trained[number // 2]
        texts: Iterator[Any] = iter([None, "", *_REASONINGS.split(block)])
        for message, reasoning, text in zip(texts, texts, texts, strict=True):
            pieces += [Piece(reasoning, generated, message and int(message)), Piece(text, generated, None)]
    return [piece for piece in pieces if piece.text]
