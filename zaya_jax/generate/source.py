"""Open what the command generates from: a model, its tokenizer, where its texts end, and its default sampling."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp

from zaya_jax.config import ParallelConfig
from zaya_jax.config.checks import shown
from zaya_jax.config.weight_source import HF, hf_folder
from zaya_jax.data.chat.template import DEFAULT_TEMPLATE
from zaya_jax.data.special_tokens import SpecialTokens, find_special_tokens, other_tokens
from zaya_jax.data.tokenizer import Tokenizer, check_vocabulary, end_tokens, load_tokenizer, read_beside, tokenizer_path
from zaya_jax.errors import InputError
from zaya_jax.generate.engine import Engine
from zaya_jax.generate.placement import FIRST_DEVICE, decode_mesh, decode_placement
from zaya_jax.generate.sampling import Sampling
from zaya_jax.generate.text import TextContinuation, stream_text
from zaya_jax.model.zaya import Zaya
from zaya_jax.ops.registry import pins_on
from zaya_jax.ops.target import current_target
from zaya_jax.parallel.decode import REPLICATED, place
from zaya_jax.parallel.placement import Placement
from zaya_jax.run.files import read_object, read_text
from zaya_jax.run.tokenizer import GENERATION
from zaya_jax.weights.load import is_transformers, open_weights

TEMPERATURE = 0.8  # of a model whose generation_config.json says nothing


class TextModel(NamedTuple):
    """A model and what belongs to its texts."""

    model: Zaya  # in the dtype to compute in
    tokenizer: Tokenizer  # its tokenizer
    special: SpecialTokens  # texts of its special tokens
    stop_tokens: list[int]  # tokens that end a text
    sampling: Sampling  # at first that of `generation_config.json`, or the default
    template: str  # source of the chat template; the built-in one if the model has none
    placement: Placement  # the devices to generate on, which all have the model
    adds_bos: bool = True  # whether texts begin with the token that begins a document, see `find_special_tokens`
    others: dict[str, str] | None = None  # more special tokens that templates receive, by name

    def make_engine(self) -> Engine:
        """Make an engine for `stream`, which reserves its slots."""
        return Engine(self.model, self.placement, slots=1, length=1, stop_tokens=self.stop_tokens)

    def stream(
        self, engine: Engine, prompts: Sequence[Sequence[int]], max_new_tokens: int, **options: Any
    ) -> Iterator[list[TextContinuation]]:
        """Continue prompts with the model's sampling; `options` are the other arguments of `text.stream_text`."""
        return stream_text(engine, self.tokenizer, prompts, max_new_tokens, self.sampling, **options)


def open_text_model(
    source: str, dtype: str | None = None, tokenizer: str | None = None, parallel: ParallelConfig = FIRST_DEVICE
) -> TextModel:
    """Open a model with its tokenizer, or the one in the folder or file `tokenizer`.

    The `source` is as for `weights.load.open_weights`; a `transformers` folder may also be named without hf:. The
    `dtype` is 'float32' or 'bfloat16', None for bfloat16 on GPUs and float32 on CPUs; `parallel` is the layout of the
    devices, see `decode_placement` (--data and --context). `InputError` if the model is missing or damaged, has no
    tokenizer of its vocabulary, or there are too few devices.
    """
    decode_mesh(parallel, "--")  # before the weights are read
    if hf_folder(source) is None and is_transformers(source):
        source = f"{HF}{source}"
    weights = open_weights(source, "PATH")
    if tokenizer is not None:
        path = tokenizer_path(tokenizer)
    elif weights.tokenizer is None or not (path := weights.tokenizer / "tokenizer.json").is_file():
        raise InputError(f"{source} has no tokenizer.json; name one with --tokenizer FOLDER.")
    special = find_special_tokens(path, chat=True, eot=None, bos=None)
    text = load_tokenizer(path, special.eot, special.bos, eos_text=special.eos)
    check_vocabulary(text, weights.config.vocab_size, path)
    stops = {text.eot, *end_tokens(path.parent, "config.json", GENERATION)}
    if dtype is None:
        dtype = "float32" if current_target().platform == "cpu" else "bfloat16"
    sampling, template = _sampling(path.parent / GENERATION), _template(path.parent)
    adds_bos = find_special_tokens(path, chat=False, eot=None, bos=None).bos is not None
    model = weights.load_model(jnp.dtype(dtype))
    placement = decode_placement(model, parallel, pins_on("cpu", (weights.optimizer_config or {}).get("ops", {})))
    model, others = place(placement.mesh, model, REPLICATED), other_tokens(path.parent)
    return TextModel(model, text, special, sorted(stops), sampling, template, placement, adds_bos, others)


def _sampling(path: Path) -> Sampling:
    tree: dict[str, Any] = read_beside(path)
    values = {name: tree[name] for name in Sampling._fields if isinstance(tree.get(name), int | float)}
    values |= {"temperature": 0.0} if tree.get("do_sample") is False else {}
    sampling = Sampling(TEMPERATURE)._replace(**values)
    sampling.check(f"{path}: ")
    return sampling


def _template(folder: Path) -> str:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return read_text(str(path), "The chat template")
    config = folder / "tokenizer_config.json"
    template = read_object(config).get("chat_template") if config.is_file() else None
    if isinstance(template, list):  # of named ones, as transformers writes several
        try:
            template = {entry["name"]: entry["template"] for entry in template}
        except (TypeError, KeyError):
            template = False
    if isinstance(template, dict):
        if not isinstance(template.get("default"), str):
            names, advice = ", ".join(map(str, template)), "Write the one to use into chat_template.jinja beside it."
            raise InputError(f"{config} has the chat templates {names}, but none named default. {advice}")
        return template["default"]
    if template is not None and not isinstance(template, str):
        allowed = "text, or a list of objects with a name and a template"
        raise InputError(f"chat_template of {config} is {shown(template)}, but must be {allowed}.")
    return template or DEFAULT_TEMPLATE
