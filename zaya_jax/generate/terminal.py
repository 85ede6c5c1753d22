"""Hold a conversation in the terminal: commands, answers as they are written, and how fast they were."""

import json
import re
import sys
import time
from pathlib import Path

from zaya_jax.errors import InputError
from zaya_jax.generate.chat import Chat
from zaya_jax.run.command_output import undecoded
from zaya_jax.run.files import expanded, read_json, write_atomically
from zaya_jax.run.signals import Interrupts

_COMMANDS = {
    "/help": "list the commands",
    "/reset": "start a new conversation, with the same system message and tools",
    "/system TEXT": "change the system message; without TEXT, remove it",
    "/tools FILE": "offer the model the functions of a JSON file, a list as in `tools` of data; without FILE, none",
    "/save FILE": "write the conversation to a JSON file, a record that can also be trained on",
    "/load FILE": "continue a conversation that was saved",
    "Ctrl-D": "leave",
}
_UNKNOWN = "\ufffd"  # of bytes that are not UTF-8, such as the first bytes of a character


def converse(chat: Chat) -> None:
    """Read messages and commands until the input ends, and print answers; on a terminal also how fast they were."""
    print("Type a message, or /help. Ctrl-C stops an answer, Ctrl-D leaves.")
    while True:
        try:
            message = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        try:
            if wrong := undecoded(message):
                unread = f"The message is not {sys.stdin.encoding}: byte {wrong} cannot be read"
                raise InputError(f"{unread}. Type it again.")
            if re.fullmatch(r"/\w+", message.partition(" ")[0]):
                _run_command(chat, *message.partition(" ")[::2])
            elif message:
                _answer(chat, message)
        except InputError as error:
            print(f"Error: {error}")


def _run_command(chat: Chat, command: str, argument: str) -> None:
    path = expanded(argument.strip())
    if command in ("/save", "/load") and not argument.strip():
        raise InputError(f"{command} needs a file: {command} FILE.")
    if command == "/help":
        for name, text in _COMMANDS.items():
            print(f"{name:13} {text}")
    elif command == "/reset":
        chat.reset()
        print("A new conversation.")
    elif command == "/system":
        chat.set_system(argument.strip() or None)
        print("The system message is set." if argument.strip() else "There is no system message.")
    elif command == "/tools":
        chat.set_tools(read_json(path) if argument.strip() else None)
        print(f"Tools: {len(chat.tools or ())}.")
    elif command == "/save":
        _save(chat, path)
    elif command == "/load":
        chat.resume(read_json(path))
        chat.file = path
        print(f"Continuing {path}: {len(chat.conversation)} messages.")
    else:
        raise InputError(f"There is no command {command}; /help lists them.")


def _save(chat: Chat, path: Path) -> None:
    if not any(message["role"] == "assistant" for message in chat.conversation):
        raise InputError("There is no answer yet to save.")
    if path.exists() and path != chat.file:
        raise InputError(f"{path} exists. Choose another name, or remove it.")
    try:
        write_atomically(path, json.dumps(chat.record(), ensure_ascii=False) + "\n")  # a line, which `prepare` reads
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}.") from error
    chat.file = path
    print(f"Saved {len(chat.conversation)} messages to {path}.")


def _answer(chat: Chat, message: str) -> None:
    shown, times = "", [(time.perf_counter(), 0)]
    try:
        with Interrupts(exits=False):  # or the conversation would be lost
            for row in chat.ask(message):
                times.append((time.perf_counter(), len(row.tokens)))
                text = row.text.rstrip(_UNKNOWN)  # an answer can end within a character
                print(text[len(shown) :], end="", flush=True)
                shown = text
    except KeyboardInterrupt:
        print(" …", end="")
    print()
    # The time until the first tokens is that of the prompt, at first with compilation.
    (first, before), (last, count) = times[1] if len(times) > 2 else times[0], times[-1]
    if count > before and sys.stderr.isatty():
        print(f"[{count} tokens, {(count - before) / (last - first):.1f} tokens/s]", file=sys.stderr)
