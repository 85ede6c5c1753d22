"""The lm-eval model `zaya_jax`: lm-eval makes the requests and the metrics, this answers the requests.

`python -m zaya_jax.evaluate PATH --tasks …` uses it; so does `lm_eval` itself, after this module was imported.
"""

# lm-eval's own types are checked only where it is installed, and reject what it accepts.
# pyright: reportTypedDictNotRequiredAccess=false, reportIncompatibleMethodOverride=false
# pyright: reportAssignmentType=false, reportArgumentType=false, reportGeneralTypeIssues=false

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]
from lm_eval.api.registry import register_model  # pyright: ignore[reportMissingImports]
from lm_eval.models.utils import (  # pyright: ignore[reportMissingImports]
    normalize_gen_kwargs,
    postprocess_generated_text,
)

from zaya_jax.config import ParallelConfig
from zaya_jax.data.conversation import parse_conversation
from zaya_jax.errors import InputError
from zaya_jax.evaluate.scoring import TOKENS, Progress, Request, Scorer
from zaya_jax.evaluate.texts import windows
from zaya_jax.evaluate.writing import ROWS, Prompt, Writer, prompt_seed
from zaya_jax.generate.chat import render
from zaya_jax.generate.placement import decode_placement
from zaya_jax.generate.sampling import Sampling
from zaya_jax.generate.source import TextModel, open_text_model

_SAMPLED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
# Settings of tasks that change nothing here.
_IGNORED = {"do_sample", "until", "max_gen_toks", "num_beams", "use_cache", "pad_token_id", "seed"}


@register_model("zaya_jax")
class ZayaLM(TemplateLM):  # type: ignore[misc]
    """A model of this package in lm-eval.

    Attributes:
      opened: the model with its tokenizer.
      scorer: answers log-likelihood requests.
      writer: answers `generate_until` requests.
      samples: name of a task → number of continuations to draw of each of its requests; 1 if absent.
      sample: which of them `generate_until` returns. All are drawn at its first call.
    """

    tokenizer_name = "zaya_jax"

    def __init__(
        self, path: str | TextModel, dtype: str | None = None, tokenizer: str | None = None,
        max_length: int | None = None, add_bos: bool | None = None, seed: int = 0, tokens: int = TOKENS,
        rows: int = ROWS, think_end: str | None = None, progress: Callable[[str], Progress] | None = None, **_: Any,
    ) -> None:  # fmt: skip
        """Open a model.

        Args:
          path: see `open_text_model`, or what it returns.
          dtype: see `open_text_model`.
          tokenizer: see `open_text_model`.
          max_length: longest input in tokens; None for the model's positions.
          add_bos: whether contexts begin with the token that begins a document; None unless `add_bos_token` of the
            tokenizer's configuration is false.
          seed: of all samples.
          tokens: tokens of a device in one forward pass.
          rows: prompts of a device in one batch of continuations.
          think_end: text after which an answer begins, such as </think>; None to return continuations whole.
          progress: makes a callback from the name of the kind of request.

        Raises:
          InputError: see `open_text_model`.
        """
        super().__init__()
        self.opened = open_text_model(path, dtype, tokenizer) if isinstance(path, str) else path
        model, text = self.opened.model, self.opened.tokenizer
        placement = decode_placement(model, ParallelConfig())
        self.scorer = Scorer(model, placement, max_length=max_length, tokens=tokens)
        self.writer = Writer(self.scorer.model, text, self.opened.stop_tokens, placement, rows)
        self.samples: Mapping[str, int] = {}
        self.sample = 0
        begins = self.opened.adds_bos if add_bos is None else add_bos
        bos = self.opened.special.bos
        self._bos, self._adds_bos, self._seed, self._think_end = bos, begins and bos is not None, seed, think_end
        self._progress = progress or (lambda _: lambda done, total: None)
        self._written: dict[tuple[str, str, int], str] = {}

    @property
    def eot_token_id(self) -> int:
        """The token that ends a document."""
        return self.opened.tokenizer.eot

    @property
    def prefix_token_id(self) -> int:
        """The token before the first of a text."""
        bos = None if self._bos is None else self.opened.tokenizer.token_id(self._bos)
        return self.eot_token_id if bos is None else bos

    @property
    def max_length(self) -> int:
        """Longest input in tokens."""
        return self.scorer.max_length

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Encode a text, in which the names of special tokens become those tokens, as in `transformers`."""
        tokens = self.opened.tokenizer.encode_template(string)
        begins = self._adds_bos if add_special_tokens is None else add_special_tokens and self._adds_bos
        if begins and self._bos is not None and not string.startswith(self._bos):
            return [self.prefix_token_id, *tokens]
        return tokens

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        del disable_tqdm
        scores = self.scorer.score([Request(context, continuation) for _, context, continuation in requests],
                                   progress=self._progress("log-likelihoods"))  # fmt: skip
        return [(score.logprob, score.is_greedy) for score in scores]

    def loglikelihood(self, requests: Any, disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """See `LM.loglikelihood`."""
        return super().loglikelihood(requests, disable_tqdm=True)

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """See `LM.loglikelihood_rolling`; a text begins after one prefix token, and never with a second one."""
        del disable_tqdm
        texts = [self.tok_encode(request.args[0], add_special_tokens=False) for request in requests]
        parts = [(index, window) for index, tokens in enumerate(texts)
                 for window in windows(tokens, self.prefix_token_id, self.max_length)]  # fmt: skip
        totals = [0.0] * len(texts)
        scores = self.scorer.score([window for _, window in parts], progress=self._progress("texts"))
        for (index, _), score in zip(parts, scores, strict=True):
            totals[index] += score.logprob
        return totals

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """See `LM.generate_until`.

        A request that appears several times, as with `repeats`, gets another sample each time. Which one a request gets
        does not depend on the other requests.
        """
        del disable_tqdm
        keys, seen, missing = [], Counter(), []
        for request in requests:
            context, settings = request.args
            samples, name = self.samples.get(request.task_name, 1), repr(sorted(settings.items()))
            first = seen[context, name] * samples
            seen[context, name] += 1
            keys.append((context, name, first + self.sample))
            missing += [(context, name, first + sample, settings) for sample in range(samples)
                        if (context, name, first + sample) not in self._written]  # fmt: skip
        prompts = [self._prompt(context, settings, sample) for context, _, sample, settings in missing]
        if prompts:
            written = self.writer.write(prompts, progress=self._progress("continuations"))
            for (context, name, sample, settings), tokens in zip(missing, written, strict=True):
                text = self.opened.tokenizer.decode(tokens, special=False)
                stop = normalize_gen_kwargs(dict(settings)).get("until")
                self._written[context, name, sample] = postprocess_generated_text(text, stop, self._think_end)
        return [self._written[key] for key in keys]

    def _prompt(self, context: str, settings: Mapping[str, Any], sample: int) -> Prompt:
        if unknown := sorted(set(normalized := normalize_gen_kwargs(dict(settings))) - {*_SAMPLED, *_IGNORED}):
            raise InputError(f"A task sets {unknown[0]} for its continuations, which zaya_jax does not support; it "
                             f"supports {', '.join(_SAMPLED)}, until and max_gen_toks.")  # fmt: skip
        greedy = not normalized["do_sample"]
        values = {name: normalized[name] for name in _SAMPLED if normalized.get(name) is not None}
        sampling = Sampling() if greedy else Sampling(temperature=1.0)._replace(**values)
        stop = tuple(text for text in normalized.get("until") or () if text)
        # With reasoning, a stop text ends the answer after it, not the reasoning, which lm-eval removes first.
        return Prompt(self.tok_encode(context) or [self.prefix_token_id], prompt_seed(self._seed, context, sample),
                      int(normalized["max_gen_toks"]), sampling, stop if self._think_end is None else ())  # fmt: skip

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Render a conversation with the model's chat template.

        Without `add_generation_prompt` the model continues the last message, so what the template adds after it is cut.
        """
        text = render(self.opened, parse_conversation(chat_history), generation_prompt=add_generation_prompt)
        last = chat_history[-1]["content"]
        if add_generation_prompt:
            return text
        last = last if last in text else last.strip()
        return text[: text.rindex(last) + len(last)]

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the source of the chat template."""
        return self.opened.template if chat_template else None
