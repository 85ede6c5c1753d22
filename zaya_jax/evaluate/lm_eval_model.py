"""The lm-eval model `zaya_jax`: lm-eval makes the requests and the metrics, this answers the requests.

`python -m zaya_jax.evaluate PATH --tasks …` uses it; so does `lm_eval` itself, after this module was imported.
"""

# lm-eval's own types are checked only where it is installed, and reject what it accepts.
# pyright: reportTypedDictNotRequiredAccess=false, reportIncompatibleMethodOverride=false
# pyright: reportAssignmentType=false, reportArgumentType=false, reportGeneralTypeIssues=false

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from lm_eval.api.model import LM  # pyright: ignore[reportMissingImports]
from lm_eval.api.registry import register_model  # pyright: ignore[reportMissingImports]
from lm_eval.models.utils import (  # pyright: ignore[reportMissingImports]
    normalize_gen_kwargs,
    postprocess_generated_text,
)

from zaya_jax.config import ParallelConfig
from zaya_jax.config.checks import counted, require
from zaya_jax.data.chat.conversation import check_pairs
from zaya_jax.errors import InputError
from zaya_jax.evaluate.scoring import TOKENS, Progress, Request, Score, Scorer, prefix_token, window_sums
from zaya_jax.evaluate.writing import ROWS, Prompt, Writer, prompt_seed
from zaya_jax.generate.chat import render, render_prompt
from zaya_jax.generate.sampling import Sampling
from zaya_jax.generate.source import TextModel, open_text_model
from zaya_jax.job.multihost import is_primary
from zaya_jax.run.signals import warn_once

# Other settings of continuations that tasks may have: read below, or without effect here.
_IGNORED = {"do_sample", "until", "max_gen_toks", "num_beams", "use_cache", "pad_token_id", "seed"}
_WHOLE = ("top_k", "max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
# The types of settings, after their name in messages. Null is as good as absent.
_TYPES = dict.fromkeys(Sampling._fields, ("a number", int, float)) | dict.fromkeys(_WHOLE, ("a whole number", int))
_TYPES |= {"do_sample": ("true or false", bool)}


@register_model("zaya_jax")
class ZayaLM(LM):  # type: ignore[misc]
    """A model of this package in lm-eval."""

    tokenizer_name = "zaya_jax"

    def __init__(
        self, path: str | TextModel, dtype: str | None = None, tokenizer: str | None = None,
        max_length: int | None = None, add_bos: bool | None = None, seed: int = 0, tokens: int = TOKENS,
        rows: int = ROWS, think_end: str | None = None, **_: Any,
    ) -> None:  # fmt: skip
        """Open a model, see `open_text_model`. The parameters are what lm-eval's users write into --model_args.

        A device gets so many `tokens` in a forward pass, and continues `rows` prompts together, with random streams of
        `seed`. Inputs have at most `max_length` tokens, by default the model's positions. Contexts begin with the token
        that begins a document if `add_bos`, by default if `add_bos_token` of the tokenizer's configuration is not
        false. Answers begin after the text `think_end`, such as </think>, or with the continuation if it is None.
        """
        super().__init__()
        opened = open_text_model(path, dtype, tokenizer, ParallelConfig()) if isinstance(path, str) else path
        self.opened = opened
        self.scorer = Scorer(opened.model, opened.placement, max_length=max_length, tokens=tokens)
        self.writer = Writer(opened.model, opened.tokenizer, opened.stop_tokens, opened.placement, rows)
        # Makes a callback from the name of the kind of request.
        self.progress: Callable[[str], Progress] = lambda _: lambda done, total: None
        # Name of a task → number of continuations to draw of each of its requests; 1 if absent.
        self.samples: Mapping[str, int] = {}
        self.sample = 0  # which of them `generate_until` returns; all are drawn at its first call
        # Name of a task → a sentence about each of its requests that could not be answered. Their values are NaN or
        # empty, so the task must get no score. None to raise the first of them as an `InputError`.
        self.failed: dict[str, list[str]] | None = None
        # Name of a task → number of its `requests` that lose their beginning, as in lm-eval's own models, since they do
        # not fit into the positions, and of the `tokens` that they lose.
        self.truncated: dict[str, Counter[str]] = {}
        begins = opened.adds_bos if add_bos is None else add_bos
        self._bos = opened.special.bos if begins else None
        self._seed, self._think_end = seed, think_end
        self._written: dict[tuple[str, str, int], str] = {}

    @property
    def prefix_token_id(self) -> int:
        """The token before the first of a text."""
        return prefix_token(self.opened.tokenizer)

    @property
    def max_length(self) -> int:
        """Longest input in tokens."""
        return self.scorer.max_length

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Encode a text, in which the names of special tokens become those tokens, as in `transformers`."""
        tokens = self.opened.tokenizer.encode_template(string)
        begins = add_special_tokens is not False and self._bos is not None and not string.startswith(self._bos)
        return [self.prefix_token_id, *tokens] if begins else tokens

    def loglikelihood(self, requests: Any, disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """See `LM.loglikelihood`."""
        pairs = [self._attempt(request, self._encode_pair, *request.args) for request in requests]
        scores = iter(self.scorer.score(list(filter(None, pairs)), progress=self.progress("log-likelihoods")))
        self._report_truncated(requests, (sum(map(len, pair)) - 1 - self.max_length if pair else 0 for pair in pairs))
        return [Score(math.nan, is_greedy=False) if pair is None else next(scores) for pair in pairs]

    def _encode_pair(self, context: str, continuation: str) -> Request:
        """Split the tokens of both texts as lm-eval does: at the number of tokens of the context without its spaces.

        If that leaves none, since one token spans the join, the continuation is encoded alone.
        """
        kept = context.rstrip()
        rest = context[len(kept) :] + continuation
        before, joined = self.tok_encode(kept), self.tok_encode(kept + rest)
        after = joined[len(before) :] or self.tok_encode(rest, add_special_tokens=False)
        if not before:
            before, after = [self.prefix_token_id], after[len(after) > 1 and after[0] == self.prefix_token_id :]
        if not 0 < len(after) <= self.max_length:
            raise InputError(f"its continuation has {len(after):,} tokens, but must have 1 to {self.max_length:,}.")
        return Request(before, after)

    def _attempt(self, request: Any, answer: Callable[..., Any], *arguments: Any) -> Any:
        """Return `answer(*arguments)`; None if that raises `InputError`, which `failed` then has."""
        try:
            return answer(*arguments)
        except InputError as error:
            text = "".join(part for part in request.args if isinstance(part, str))[-100:]
            message = f"The task {request.task_name} has a request that cannot be answered, {text!r}: {error}"
            if self.failed is None:
                raise InputError(message) from error
            self.failed.setdefault(request.task_name, []).append(message)
            return None

    def _report_truncated(self, requests: Iterable[Any], excess: Iterable[int]) -> None:
        """Count and tell the requests that are too long, by their tokens beyond the most that they may have."""
        for request, tokens in zip(requests, excess, strict=True):
            if tokens > 0:
                self.truncated.setdefault(request.task_name, Counter()).update(requests=1, tokens=tokens)
        for task, count in self.truncated.items() if is_primary() else ():
            number, length = (counted(count[f"{noun}s"], noun) for noun in ("request", "token"))
            text = f"did not fit into the positions of the model, so that {length} at the beginning were left out"
            warn_once(f"Warning: {number} of the task {task} {text}.")

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """See `LM.loglikelihood_rolling`; a text begins after one prefix token, and never with a second one."""
        del disable_tqdm
        texts = [self._attempt(request, self.tok_encode, *request.args, False) for request in requests]
        encoded = (tokens or [] for tokens in texts)
        sums = window_sums(self.scorer, encoded, self.prefix_token_id, self.progress("texts"))
        return [math.nan if tokens is None else total for tokens, total in zip(texts, sums, strict=True)]

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """See `LM.generate_until`.

        A request that appears several times, as with `repeats`, gets another sample each time. Which one a request gets
        does not depend on the other requests.
        """
        del disable_tqdm
        keys, seen, missing = [], Counter(), []
        for request in requests:
            context, settings = request.args
            samples, setting = self.samples.get(request.task_name, 1), repr(sorted(settings.items(), key=str))
            first = seen[context, setting] * samples
            seen[context, setting] += 1
            keys.append((context, setting, first + self.sample))
            drawn = ((context, setting, first + sample) for sample in range(samples))
            missing += [(key, request) for key in drawn if key not in self._written]
        arguments_by_request = ((request, (request.task_name, *request.args, key[2])) for key, request in missing)
        prompts = [self._attempt(request, self._prompt, *arguments) for request, arguments in arguments_by_request]
        written = iter(self.writer.write(list(filter(None, prompts)), progress=self.progress("continuations")))
        for (key, request), prompt in zip(missing, prompts, strict=True):
            self._written[key] = self._answer(prompt.tokens, next(written), request.args[1]) if prompt else ""
        most = self.opened.model.config.max_positions
        excess = (len(each.tokens) + each.max_new_tokens - most if each else 0 for each in prompts)
        self._report_truncated((request for _, request in missing), excess)
        return [self._written[key] for key in keys]

    def _answer(self, prompt: Sequence[int], tokens: list[int], settings: Mapping[str, Any]) -> str:
        """Cut a continuation at its stop texts, which may be special tokens, then remove the special tokens left."""
        tokenizer, stop = self.opened.tokenizer, _normalized(settings).get("until")
        text = postprocess_generated_text(tokenizer.decode_after(prompt, tokens), stop, self._think_end)
        specials = sorted(tokenizer.specials, key=len, reverse=True)  # one may begin with another
        return re.sub("|".join(map(re.escape, specials)), "", text) if specials else text

    def check(self, tasks: Mapping[str, Any], chat: bool) -> None:
        """Raise `InputError` if one of lm-eval's tasks cannot be answered, before hours of scoring.

        With `chat` their prompts are rendered with the chat template.
        """
        if chat:
            self.apply_chat_template([{"role": "user", "content": "a"}])
        for name, task in tasks.items():
            if task.get_config("output_type") == "generate_until":
                self._prompt(name, "", task.get_config("generation_kwargs") or {}, 0)

    def _prompt(self, task: str, context: str, settings: Mapping[str, Any], sample: int) -> Prompt:
        """Make the prompt of a request; InputError if the settings of its task are invalid."""
        prefix = f"The task {task}'s "
        for key, (named, *types) in _TYPES.items():
            require(type(settings.get(key)) in (type(None), *types), f"{prefix}{key}", settings.get(key), named)
        until, beams = settings.get("until"), settings.get("num_beams")
        texts = until if isinstance(until, list) else [] if until is None else [until]
        require(all(isinstance(text, str) for text in texts), f"{prefix}until", until, "text or a list of texts")
        require(beams in (None, 1), f"{prefix}num_beams", beams, "1, since zaya_jax has no beam search")
        normalized = _normalized(settings)
        if unknown := sorted({*normalized} - {*Sampling._fields, *_IGNORED}, key=str):
            supported = f"it supports {', '.join(Sampling._fields)}, until and max_gen_toks"
            setting = f"The task {task} sets {unknown[0]} for its continuations"
            raise InputError(f"{setting}, which zaya_jax does not support; {supported}.")
        longest, new = self.opened.model.config.max_positions, normalized["max_gen_toks"]
        if not 0 < new < longest:
            fewer = f"fewer than the model's {longest:,} positions. Set max_new_tokens."
            new_tokens = counted(new, "new token")
            raise InputError(f"The task {task} asks for {new_tokens}, but must ask for at least 1 and {fewer}")
        greedy = not normalized["do_sample"]
        fields = ("repetition_penalty",) if greedy else Sampling._fields
        values = {name: normalized[name] for name in fields if normalized.get(name) is not None}
        sampling = Sampling(temperature=0.0 if greedy else 1.0)._replace(**values)
        sampling.check(prefix)
        stop = tuple(filter(None, normalized.get("until", ())))
        # With reasoning, a stop text ends the answer after it, not the reasoning, which lm-eval removes first.
        stop = stop if self._think_end is None else ()
        tokens, seed = self.tok_encode(context) or [self.prefix_token_id], prompt_seed(self._seed, context, sample)
        return Prompt(tokens, seed, new, sampling, stop)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Render messages with the model's chat template, up to the assistant's next turn; InputError if it cannot.

        Without `add_generation_prompt` the model continues the last message, so what the template adds after it is cut.
        """
        for number, message in enumerate(chat_history, 1):
            location = f"Message {number} of a task's chat"
            if not all(isinstance(message.get(key), str) for key in ("role", "content")):
                raise InputError(f"{location} is {message!r:.200}, but must have a role and a content that are text.")
            try:
                check_pairs(message, location)
            except ValueError as error:
                raise InputError(f"{error}.") from error
        if add_generation_prompt:
            return render_prompt(self.opened, chat_history)
        text, last = render(self.opened, chat_history, generation_prompt=False), chat_history[-1]["content"]
        last = last if last in text else last.strip()
        if last not in text:
            raise InputError(f"The chat template changes the message {last!r:.200}, so the model cannot continue it.")
        return text[: text.rindex(last) + len(last)]

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the source of the chat template."""
        return self.opened.template if chat_template else None


def _normalized(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of a task's continuations under their usual names, without those that are null."""
    return normalize_gen_kwargs({key: value for key, value in settings.items() if value is not None})
