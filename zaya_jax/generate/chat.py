"""Hold a conversation: render it with the model's chat template up to the assistant's next turn."""

import time
from collections.abc import Iterator

from zaya_jax.config.checks import counted
from zaya_jax.data.chat.conversation import THINK, THINK_END, Conversation, find_special, parse_conversation
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
        self._system: Conversation = [] if system is None else [{"role": "system", "content": system}]
        self.conversation: Conversation = list(self._system)  # the messages so far
        _, after = _around_answer(opened, [{"role": "user", "content": "a"}])
        self.stop = [end] if (end := after.strip()) else []  # texts that end an answer

    def reset(self) -> None:
        """Forget all messages but the system message."""
        self.conversation = list(self._system)

    def prompt(self, message: str) -> list[int]:
        """Return the tokens that the model continues after a message; InputError if that has text that ends a turn."""
        specials = self._opened.tokenizer.specials.union(self.stop)
        if special := find_special([*self._system, {"content": message}], specials):
            raise InputError(f"The message or --system has {special!r}, which would end a turn. Write it another way.")
        text = render_prompt(self._opened, [*self.conversation, {"role": "user", "content": message}])
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
        answer = ""
        try:
            new = min(self._max_new_tokens, room)
            options = {"seeds": [self._seed], "stop": self.stop, "block": _BLOCK}
            for (row,) in opened.stream(self._engine, [tokens], new, **options):
                answer = row.text
                yield row
        finally:  # keep the part of an interrupted answer that was yielded
            if answer.lstrip().startswith(THINK) and THINK_END not in answer:
                answer += THINK_END
            messages = [{"role": "user", "content": message}, {"role": "assistant", "content": answer}]
            self.conversation += parse_conversation(messages)
            self._seed += 1


def render_prompt(opened: TextModel, conversation: Conversation) -> str:
    """Render a conversation up to the assistant's next turn; InputError if the template cannot.

    A template without a generation prompt, as the built-in one, gets what it writes before an assistant's message.
    """
    if "add_generation_prompt" in opened.template:
        return render(opened, conversation, generation_prompt=True)
    return _around_answer(opened, conversation)[0]


def _around_answer(opened: TextModel, conversation: Conversation) -> tuple[str, str]:
    """Render a conversation; returns the text before and after the assistant's next answer."""
    rendered = render(opened, [*conversation, {"role": "assistant", "content": _ANSWER}], generation_prompt=False)
    before, mark, after = rendered.partition(_ANSWER)
    if not mark:
        raise InputError("The chat template leaves out the content of the assistant's messages.")
    return before, after


def render(opened: TextModel, conversation: Conversation, *, generation_prompt: bool) -> str:
    """Render a conversation with a model's chat template; InputError if the template cannot."""
    texts = {"bos_token": opened.special.bos, "eos_token": opened.special.eos, **(opened.others or {})}
    names = {"add_generation_prompt": generation_prompt, **{name: text for name, text in texts.items() if text}}
    answer = run_template(opened.template, [render_request(conversation, names) | {"now": time.time()}])
    if "error" in answer:
        raise InputError(f"The chat template cannot render the conversation: {answer['error']}.")
    return answer["texts"][0]
