"""Tools of conversations: their descriptions, the assistant's calls, and how a prepared record holds them.

Calls have the form of OpenAI's API and of `transformers`' chat templates: a `function` with a `name` and `arguments`.
"""

import json
from typing import Any

from zaya_jax.data.readers.values import json_kind

Messages = list[dict[str, Any]]


def with_tools(messages: Any, tools: Any) -> Any:
    """Return a record of a conversation: the list of messages, or an object if there are tools."""
    return {"messages": messages, "tools": tools} if tools else messages


def split_tools(record: Any) -> tuple[Any, Any]:
    """Return the messages and the tools of a record; None without tools."""
    return (record["messages"], record["tools"]) if isinstance(record, dict) else (record, None)


def parse_tools(value: Any) -> list[dict[str, Any]] | None:
    """Validate the `tools` of a row: a list of objects, or its JSON text.

    Raises:
      ValueError: it is neither. The message is a clause that names the key; the caller adds the location.
    """
    tools = _from_text(value, "tools")
    if not tools:
        return None
    if not isinstance(tools, list):
        raise ValueError(f"tools is {json_kind(tools)}, but must be a list")
    for number, tool in enumerate(tools):
        _function(tool, f"tools[{number}]")
    return tools


def parse_calls(value: Any, where: str) -> Messages:
    """Validate the `tool_calls` of a message.

    Args:
      value: list of calls, each {"function": {"name", "arguments"}} or {"name", "arguments"}; arguments are an object
        or its JSON text.
      where: names the message, for errors.

    Returns:
      The calls in the first form, with arguments as objects; other keys are kept.

    Raises:
      ValueError: as `parse_tools`.
    """
    if not isinstance(value, list):
        raise ValueError(f"{where} has tool_calls that are {json_kind(value)}, but must be a list")
    return [_call(call, f"{where}, tool_calls[{number}]") for number, call in enumerate(value)]


def calls_from_sharegpt(value: Any, where: str) -> Messages:
    """Read the `value` of a ShareGPT message from `function_call`: a call or a list of calls, or its JSON text."""
    key = f"{where} (function_call), value"
    calls = _from_text(value, key)
    return [_call(call, key) for call in (calls if isinstance(calls, list) and calls else [calls])]


def _call(call: Any, where: str) -> dict[str, Any]:
    function = _function(call, where)
    kept = {key: call[key] for key in call.keys() - ({"function"} if "function" in call else {"name", "arguments"})}
    others = [key for key in kept if key not in ("id", "type", "index") and kept[key]]
    others += [key for key in function if key not in ("name", "arguments") and function[key]]
    if others:
        raise ValueError(f"{where} has {others[0]}, which is not read; a call has a name and arguments")
    key = f"{where}.function.arguments" if "function" in call else f"{where}.arguments"
    arguments = _from_text(function.get("arguments"), key) or {}
    if not isinstance(arguments, dict):
        raise ValueError(f"{key} is {json_kind(arguments)}, but must be an object")
    return {"type": "function", **kept, "function": {**function, "arguments": arguments}}


def _function(value: Any, where: str) -> dict[str, Any]:
    """Return the function that a call or a tool names."""
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
