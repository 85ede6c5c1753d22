"""Hold a conversation: render it with the model's chat template up to the assistant's next turn."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zaya_jax.config.checks import counted
from zaya_jax.data.chat.conversation import (
    THINK,
    THINK_END,
    Conversation,
    check_pairs,
    find_special,
    parse_conversation,
    parse_record,
    parse_tools,
)
from zaya_jax.data.chat.template import render_request
from zaya_jax.data.chat.template_process import run_template
from zaya_jax.errors import InputError
from zaya_jax.generate.sampling import Sampling
from zaya_jax.generate.source import TextModel
from zaya_jax.generate.text import TextContinuation

_ANSWER = "\u241e answer \u241e"  # stands for the assistant's answer; no template has it
_BLOCK = 4  # tokens per update of a streamed answer


class Chat:
    """A conversation with a model."""

    def __init__(
        self, opened: TextModel, sampling: Sampling, max_new_tokens: int, seed: int = 0, system: str | None = None
    ) -> None:
        """Start a conversation, perhaps with a `system` message; InputError if the template does not render one.

        `seed` is that of the first answer; each later answer has the next one.
        """
        self._opened, self._max_new_tokens, self._seed = opened._replace(sampling=sampling), max_new_tokens, seed
        self._engine = opened.make_engine()
        self.conversation: Conversation = []  # the messages so far
        self.tools: Conversation | None = None  # functions that the model may call
        self.file: Path | None = None  # where the conversation was saved
        self.set_system(system)
        _, after = _around_answer(opened, [{"role": "user", "content": "a"}])
        self.stop = [end] if (end := after.strip()) else []  # texts that end an answer

    def reset(self) -> None:
        """Forget all messages but the system message."""
        self.conversation = self.conversation[: self._has_system]
        self.file = None

    def set_system(self, text: str | None) -> None:
        """Replace the system message; None for none."""
        system: Conversation = [] if text is None else [{"role": "system", "content": text}]
        self.conversation = system + self.conversation[self._has_system :]

    @property
    def _has_system(self) -> bool:
        return bool(self.conversation) and self.conversation[0]["role"] == "system"

    def set_tools(self, tools: Any) -> None:
        """Offer the model other functions, see `parse_tools`; InputError if they are none."""
        try:
            parsed = parse_tools(tools)
            check_pairs(parsed, "tools")
        except ValueError as error:
            raise InputError(f"These are no tools: {error}.") from None
        self.tools = parsed

    def record(self) -> dict[str, Any]:
        """Return the conversation as a record of data, which `resume` takes."""
        return {"messages": self.conversation} | ({"tools": self.tools} if self.tools else {})

    def resume(self, record: Any) -> None:
        """Continue the conversation of a record; InputError if it is none, or a message to the model ends a turn."""
        try:
            if isinstance(record, dict) and "messages" not in record:
                raise ValueError("the object has no messages")
            conversation, tools = parse_record(record)
        except ValueError as error:
            raise InputError(f"This is no conversation: {error}.") from None
        # A model can write the name of a special token in its answers.
        written = [message for message in conversation if message["role"] != "assistant"]
        self._check([*written, *(tools or [])], "The conversation")
        self.conversation, self.tools = conversation, tools

    def _check(self, messages: Conversation, what: str) -> None:
        specials = self._opened.tokenizer.specials.union(self.stop)
        if special := find_special(messages, specials):
            raise InputError(f"{what} has {special!r}, which would end a turn. Write it another way.")

    def prompt(self, message: str) -> list[int]:
        """Return the tokens that the model continues after a message; InputError if that has text that ends a turn."""
        messages = [*self.conversation, {"role": "user", "content": message}]
        fixed = [*self.conversation[: self._has_system], *(self.tools or [])]
        self._check([*fixed, messages[-1]], "The message, a tool or --system")
        text = render_prompt(self._opened, messages, self.tools)
        return self._opened.tokenizer.encode_template(text)

    def ask(self, message: str) -> Iterator[TextContinuation]:
        """Yield the answer to a message as it grows; what was yielded last becomes part of the conversation.

        InputError if the conversation leaves no room in the model's positions, or see `prompt`.
        """
        opened, tokens = self._opened, self.prompt(message)
        room = opened.model.config.max_positions - len(tokens)
        if room < 1:
            length, most = counted(len(tokens), "token"), f"model.max_positions is {room + len(tokens):,}"
            raise InputError(f"The conversation has {length}, but {most}. Start a new one with /reset.")
        answer = None
        try:
            new = min(self._max_new_tokens, room)
            options = {"seeds": [self._seed], "stop": self.stop, "block": _BLOCK}
            for (row,) in opened.stream(self._engine, [tokens], new, **options):
                answer = row.text
                yield row
        finally:  # keep the part of an interrupted answer that was yielded, if any
            if answer is not None:
                if answer.lstrip().startswith(THINK) and THINK_END not in answer:
                    answer += THINK_END
                messages = [{"role": "user", "content": message}, {"role": "assistant", "content": answer}]
                self.conversation += parse_conversation(messages)
                self._seed += 1


def render_prompt(opened: TextModel, conversation: Conversation, tools: Conversation | None = None) -> str:
    """Render a conversation up to the assistant's next turn, with tools; InputError if the template cannot.

    A template without a generation prompt, as the built-in one, gets what it writes before an assistant's message.
    """
    if "add_generation_prompt" in opened.template:
        return render(opened, conversation, generation_prompt=True, tools=tools)
    return _around_answer(opened, conversation, tools)[0]


def _around_answer(opened: TextModel, conversation: Conversation, tools: Conversation | None = None) -> tuple[str, str]:
    """Render a conversation; returns the text before and after the assistant's next answer."""
    answered = [*conversation, {"role": "assistant", "content": _ANSWER}]
    rendered = render(opened, answered, generation_prompt=False, tools=tools)
    before, mark, after = rendered.partition(_ANSWER)
    if not mark:
        raise InputError("The chat template leaves out the content of the assistant's messages.")
    return before, after


def render(
    opened: TextModel, conversation: Conversation, *, generation_prompt: bool, tools: Conversation | None = None
) -> str:
    """Render a conversation with a model's chat template; InputError if the template cannot."""
    texts = {"bos_token": opened.special.bos, "eos_token": opened.special.eos, **(opened.others or {})}
    names = {
        "add_generation_prompt": generation_prompt,
        "tools": tools,
        **{name: text for name, text in texts.items() if text},
    }
    answer = run_template(opened.template, [render_request(conversation, names) | {"now": time.time()}])
    if "error" in answer:
        raise InputError(f"The chat template cannot render the conversation: {answer['error']}.")
    return answer["texts"][0]
