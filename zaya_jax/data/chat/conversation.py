"""Validate conversations of any input format, and normalize them to the form that chat templates receive.

Tools and calls have the form of OpenAI's API and of `transformers`' chat templates: a `function` with a `name` and, in
calls, `arguments`.
"""

import json
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from zaya_jax.data.readers.fields import EMPTY, OFF, json_kind

Conversation = list[dict[str, Any]]

ROLES = ("system", "developer", "user", "assistant", "tool")
# `from` of a ShareGPT message → role.
SHAREGPT = {"system": "system", "human": "user", "gpt": "assistant", "function_call": "assistant"}
SHAREGPT |= dict.fromkeys(("observation", "tool"), "tool")
# Keys that say whether a message of the assistant is trained: OpenAI's, axolotl's, ms-swift's, and their kind.
_WEIGHTS = ("weight", "train", "training", "loss", "trainable", "trained", "train_on_turn", "loss_mask")
REASONING = ("reasoning", "reasoning_content", "thinking")
# Keys that are refused, since they would change what is trained: parts of what is said, and which parts are trained.
_REFUSED = re.compile(
    "functions|function_calls?|tool_call|tool_responses|tool_plan|refusal|audio|images?|videos|attachments|channel|"
    "reasoning_(details|text)|thinking_blocks|thoughts?|analysis|train(ing)?_detail|mask(ed)?|ignore|prefix"
)
_REFUSED_OF_OTHERS = re.compile(f"{_REFUSED.pattern}|tool_calls")
_READ = ("role", "content", "weight", "tool_call_id", "reasoning", "tool_calls")  # the last two of the assistant
HALF_OF_PAIR = re.compile("[\ud800-\udfff]")
THINK, THINK_END = "<think>", "</think>"


def parse_conversation(value: Any) -> Conversation:
    """Validate a conversation and normalize it.

    In the result, each message has a `role` of `ROLES` and a string `content`, which may be None or absent if it calls
    tools; an assistant message also has its `reasoning`, if any, and a `weight` of 0 if it is not trained (given by a
    key of `_WEIGHTS`). The input can give reasoning by a key of `REASONING`, or as `<think>…</think>` at the start of
    the content; the newlines around it are stripped, as templates do. The content can be a list of text parts.
    ShareGPT messages with `from` and `value` work too. Other keys are kept.

    `ValueError`, as a clause that counts messages from 1, if it is no conversation, or no assistant message is trained.
    """
    if not isinstance(value, list) or not value:
        raise ValueError("a conversation must be a list of at least one message")
    conversation = [_parse_message(message, f"message {number}") for number, message in enumerate(value, 1)]
    if all(message["role"] != "assistant" for message in conversation):
        raise ValueError("the conversation has no assistant message")
    if all(message.get("weight") == 0 for message in conversation if message["role"] == "assistant"):
        raise ValueError("no assistant message of the conversation is trained")
    return conversation


def _parse_message(value: Any, location: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{location} is not an object with a role and a content")
    if "role" not in value and "from" in value:
        value = _from_sharegpt(value, location)
    role = value.get("role")
    if not isinstance(role, str):
        raise ValueError(f"{location} has no role")
    if role not in ROLES:
        raise ValueError(f"{location} has the role {role!r:.50}, which is not one of {', '.join(ROLES)}")
    pattern = _REFUSED if role == "assistant" else _REFUSED_OF_OTHERS
    if key := next((key for key, content in value.items() if pattern.fullmatch(key) and content not in OFF), None):
        advice = "write it as tool_calls" if "function_call" in key else "remove it"
        raise ValueError(f"{location} has a {key}, which is not read; {advice}")
    message = _with_weight(value, location)
    if role == "assistant" and value.get("tool_calls"):
        if not isinstance(calls := value["tool_calls"], list):
            raise ValueError(f"{location} has tool_calls that are {json_kind(calls)}, but must be a list")
        message["tool_calls"] = [_call(call, f"{location}, tool_calls[{number}]") for number, call in enumerate(calls)]
    check_pairs(message, location)
    if "content" in value or role != "assistant" or not value.get("tool_calls"):
        message["content"] = _content(value, location)
    if role != "assistant":
        return message
    reasoning = _reasoning(message, location)
    if not reasoning and (content := message.get("content")):
        reasoning, message["content"] = _split(content, location)
    return {**message, "reasoning": reasoning} if reasoning else message


def unread_keys(conversation: Conversation) -> list[str]:
    """List the keys that only templates of a person's own may read, once for each message that has one."""
    keys = []
    for message in conversation:
        read = _READ if message["role"] == "assistant" else _READ[:4]
        keys += [f"messages[].{key}" for key, value in message.items() if value not in EMPTY and key not in read]
    return keys


def _from_sharegpt(message: dict[str, Any], location: str) -> dict[str, Any]:
    speaker = message["from"]
    if not isinstance(speaker, str) or speaker not in SHAREGPT:
        raise ValueError(f"{location} is from {speaker!r:.50}, which is not one of {', '.join(SHAREGPT)}")
    rest = {key: value for key, value in message.items() if key not in ("from", "value")}
    if speaker == "function_call":
        key = f"{location} (function_call), value"
        calls = _from_text(message.get("value"), key)
        calls = [_call(call, key) for call in (calls if isinstance(calls, list) and calls else [calls])]
        return {**rest, "role": SHAREGPT[speaker], "content": None, "tool_calls": calls}
    if not isinstance(message.get("value"), str | list):
        raise ValueError(f"{location} has a value that is {json_kind(message.get('value'))}, but must be text")
    return {**rest, "role": SHAREGPT[speaker], "content": message["value"]}


def _with_weight(message: dict[str, Any], location: str) -> dict[str, Any]:
    """Return a message whose only key of `_WEIGHTS` is a `weight` of 0, if it is not trained."""
    flags = {key: message[key] for key in _WEIGHTS if message.get(key) is not None}
    rest = {key: x for key, x in message.items() if key not in _WEIGHTS}
    for key, value in flags.items():
        if not isinstance(value, int | float) or value not in (0, 1):
            raise ValueError(f"{location} has the {key} {value!r:.50}, but must have 0 or 1 (false or true)")
        if value and message["role"] != "assistant" and key != "weight":  # a weight of 1 is often everywhere
            raise ValueError(f"{location} has the {key} {value!r}, but only what the assistant writes is trained")
    if len({bool(value) for value in flags.values()}) > 1:
        raise ValueError(f"{location} has {' and '.join(flags)} that differ")
    is_untrained = message["role"] == "assistant" and flags and not any(flags.values())
    return {**rest, "weight": 0} if is_untrained else rest


def _content(message: dict[str, Any], location: str) -> str | None:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None and message["role"] == "assistant" and message.get("tool_calls"):
        return None  # as transformers passes it to the template
    if not isinstance(content, list):
        raise ValueError(f"{location} has a content that is neither a string nor a list of text parts")
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f"{location} has a content part that is not text")
    return "".join(part["text"] for part in content)


def _reasoning(message: dict[str, Any], location: str) -> str:
    """Remove the reasoning from a message and return it; empty if there is none."""
    texts = {key: text for key in REASONING if (text := message.pop(key, None)) is not None}
    if not all(isinstance(text, str) for text in texts.values()):
        raise ValueError(f"{location} has a reasoning that is not a string")
    texts = {key: text for key, text in texts.items() if text.strip()}
    if len(set(texts.values())) > 1:
        raise ValueError(f"{location} has a {' and a '.join(texts)} that differ")
    return next(iter(texts.values()), "")


def _split(content: str, location: str) -> tuple[str, str]:
    """Split a content into reasoning and answer; empty reasoning stays where it is."""
    if not content.lstrip().startswith(THINK):
        return "", content
    reasoning, end, answer = content.lstrip().removeprefix(THINK).partition(THINK_END)
    if not end:
        raise ValueError(f"{location} has a {THINK} without {THINK_END}")
    return (reasoning.strip("\n"), answer.lstrip("\n")) if reasoning.strip() else ("", content)


def split_tools(record: Any) -> tuple[Any, Any]:
    """Return the messages and the tools of a record, a list or an object with `messages`; None without tools."""
    return (record["messages"], record.get("tools")) if isinstance(record, dict) else (record, None)


def parse_record(record: Any) -> tuple[Conversation, Conversation | None]:
    """Validate and normalize a record; return the messages, and the tools, if any. `ValueError` as a clause."""
    messages, tools = split_tools(record)
    conversation, tools = parse_conversation(messages), parse_tools(tools)
    check_pairs(tools, "tools")
    return conversation, tools


def parse_tools(value: Any) -> Conversation | None:
    """Validate the `tools` of a row: a list of objects, or its JSON text; otherwise `ValueError`, as a clause."""
    tools = _from_text(value, "tools")
    if not tools:
        return None
    if not isinstance(tools, list):
        raise ValueError(f"tools is {json_kind(tools)}, but must be a list")
    for number, tool in enumerate(tools):
        _function(tool, f"tools[{number}]")
    return tools


def _call(call: Any, location: str) -> dict[str, Any]:
    """Return a call, or {"name", "arguments"}, as {"function": {"name", "arguments"}} with arguments as an object."""
    function = _function(call, location)
    kept = {key: call[key] for key in call.keys() - ({"function"} if "function" in call else {"name", "arguments"})}
    others = [key for key in kept if key not in ("id", "type", "index") and kept[key]]
    others += [key for key in function if key not in ("name", "arguments") and function[key]]
    if others:
        raise ValueError(f"{location} has {others[0]}, which is not read; a call has a name and arguments")
    key = f"{location}.function.arguments" if "function" in call else f"{location}.arguments"
    arguments = _from_text(function.get("arguments"), key) or {}
    if not isinstance(arguments, dict):
        raise ValueError(f"{key} is {json_kind(arguments)}, but must be an object")
    return {"type": "function", **kept, "function": {**function, "arguments": arguments}}


def _function(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is {json_kind(value)}, but must be an object")
    function = value.get("function", value)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise ValueError(f"{where}{'.function' if 'function' in value else ''} has no name")
    return {key: function[key] for key in ("name", "arguments") if key in function} if function is value else function


def _from_text(value: Any, key: str) -> Any:
    """Parse a value that may be JSON text; blank text is None."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{key} is text that is not JSON ({error})".replace("\n", " ")) from error


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


def check_pairs(value: Any, location: str) -> None:
    """Raise `ValueError` if a string of a JSON value contains half of a surrogate pair."""
    if any(HALF_OF_PAIR.search(text) for text in _strings(value)):
        raise ValueError(f"{location} contains an unpaired surrogate")


def find_special(conversation: Conversation, specials: frozenset[str]) -> str | None:
    """Return the first text of a special token in any string of the conversation, or None.

    Renderings are encoded with special tokens enabled, so such text would become a token and could end a turn.
    """
    matches = map(_alternatives(specials).search, _strings(conversation) if specials else ())
    return next((match.group() for match in matches if match), None)


@lru_cache(maxsize=4)
def _alternatives(texts: frozenset[str]) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(text) for text in sorted(texts, key=lambda text: (-len(text), text))))
