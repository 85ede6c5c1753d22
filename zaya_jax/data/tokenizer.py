"""Train a byte-level BPE tokenizer or load a `tokenizer.json`, and convert text to token ids and back."""

import functools
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from zaya_jax.config.checks import require
from zaya_jax.errors import InputError, as_sentence, printable
from zaya_jax.run.files import expanded, hub_hint, read_object, require_regular, write_atomically
from zaya_jax.run.tokenizer import GENERATION, TOKENIZER_CONFIG

EOT_TEXT = "<|endoftext|>"
EOT_TEXTS = (EOT_TEXT, "<|end_of_text|>", "<eos>", "</s>")  # common tokens that end a document
# Names, in published models, of tokens that begin or end a document or a turn. Texts may write fill-in-the-middle's.
_CONTROL = re.compile(
    r"<[|｜](?!fim|repo|file).+[|｜]>|<\|\w+>|<\w+\|>|</?(s|bos|eos|pad|\w+_of_\w+|eo[tmd]|im_\w+|system|user|assistant)>|"
    r"\[/?(INST|SYSTEM_PROMPT|TOOL_\w+|AVAILABLE_TOOLS|[gs]MASK)\]"
)
MIN_VOCAB = 257  # every byte and the end-of-text token

_PADDED_TO = 128  # vocabularies are padded to a multiple of this, since matrix units work on whole tiles
_JOINED = 16  # tokens; those of a character or a word that is decoded as one are fewer
# Characters with every byte of UTF-8, which NFC does not change, and white space of which there is more than a space.
_PROBE = "".join(map(chr, [*b" a  b\n\n c ", *range(0x80), *range(0xA1, 0x800, 63), *range(0x4E00, 0x4E40)]))
_PROBE += "".join(map(chr, [*range(0xA00, 0xD001, 0x600), 0xD7A0, 0xE000, 0xFB50, 0x10300, 0x50300, 0x90300, 0xD0300]))
_PROBE += chr(0x100300)
# A normalizer that does more than to compose characters and to write spaces in another way.
_REPLACES = re.compile(rb'"type":"(?!NFC"|Prepend"|Sequence"|Replace","pattern":{"String":" "})')
_BATCH_TEXTS = 256  # enough for all cores, few enough for memory


class Tokenizer:
    """Converts text to token ids and back.

    `encode` treats the name of a special token inside a text as ordinary text. With a tokenizer from `train_tokenizer`,
    `decode(encode(text)) == text` for every text.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        eot_text: str = EOT_TEXT,
        bos_text: str | None = None,
        eos_text: str | None = None,
        stops: Iterable[str] = (),
    ) -> None:
        """Wrap a tokenizer of the `tokenizers` library (see `train_tokenizer`, `load_tokenizer`).

        These tokens and those of turns become special, whatever their flags say, so that no text can contain them. They
        match before a text is normalized. So do `stops`, other tokens that end or begin a turn.
        """
        self._backend = backend
        named = filter(None, (eot_text, bos_text, eos_text, *stops))
        ends = [text for text in named if backend.token_to_id(text) is not None]
        added = {token.content: token for token in backend.get_added_tokens_decoder().values()}
        special = []
        for text, token in ({text: AddedToken(text) for text in ends} | added).items():
            is_special = token.special or text in ends or _CONTROL.fullmatch(text)
            if is_special and (token.normalized or not token.special):
                flags = {"single_word": token.single_word, "lstrip": token.lstrip, "rstrip": token.rstrip}
                special.append(AddedToken(text, **flags, normalized=False))
        backend.add_special_tokens(special)
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True
        self.eot = self._known(eot_text)  # id of the token that ends a document
        self.eot_text = eot_text
        self.prefix = [] if bos_text is None else [self._known(bos_text)]  # ids of the tokens that begin a document

    def _known(self, text: str) -> int:
        token = self.token_id(text)
        if token is None:
            raise InputError(f"The tokenizer has no token {text!r}.")
        return token

    def token_id(self, text: str) -> int | None:
        """Return the id of the token `text`; None if it is not in the vocabulary."""
        return self._backend.token_to_id(_checked(text))

    @functools.cached_property
    def vocab_size(self) -> int:
        """The largest token id plus 1. After training on a small corpus, it can be below the requested size."""
        return max(self._backend.get_vocab(with_added_tokens=True).values()) + 1

    @functools.cached_property
    def bytes_covered(self) -> int:
        """The number of bytes, of 256, that have a token of a byte-level tokenizer."""
        return sum(self._backend.token_to_id(sign) is not None for sign in pre_tokenizers.ByteLevel.alphabet())

    @functools.cached_property
    def specials(self) -> frozenset[str]:
        """The texts of the special tokens."""
        return frozenset(token.content for token in self._backend.get_added_tokens_decoder().values() if token.special)

    def controls(self, template: str) -> frozenset[str]:
        """Return the added tokens in a chat template's source, except pairs of tags, which texts may have."""
        added = {token.content for token in self._backend.get_added_tokens_decoder().values()}
        longest_first = sorted(filter(None, added), key=len, reverse=True)  # one may be part of another
        written = re.findall("|".join(map(re.escape, longest_first)), template) if added else []

        def is_control(text: str) -> bool:
            pair = {text.replace("</", "<"), text.replace("<", "</")} & added - {text}
            return not (text.isalnum() or text.isspace() or pair)

        return frozenset(filter(is_control, written))

    def encode(self, text: str) -> list[int]:
        """Encode a text without adding special tokens; `InputError` if it is not UTF-8, or the library fails on it."""
        with _library("encode a text"):
            return self._backend.encode(_checked(text), add_special_tokens=False).ids

    def encode_all(self, texts: Iterable[str]) -> Iterator[list[int]]:
        """Encode texts in order, on all cores; see `encode`."""
        texts = iter(texts)
        while batch := list(islice(texts, _BATCH_TEXTS)):
            with _library("encode a text"):
                encodings = self._backend.encode_batch_fast(batch, add_special_tokens=False)
            yield from (encoding.ids for encoding in encodings)

    def encode_counted(self, texts: Iterable[str]) -> Iterator[tuple[list[int], int]]:
        """Encode like `encode_all`; also return the UTF-8 bytes of each text that its tokens do not decode to."""
        texts, copies = itertools.tee(texts)
        for text, tokens in zip(texts, self.encode_all(copies), strict=True):
            known = [] if self._keeps_all else [token for token in tokens if token != self._unknown]
            yield tokens, 0 if self._keeps_all else _lost(text, self.decode(known))

    @functools.cached_property
    def _keeps_all(self) -> bool:
        """True if no text is lost: there are tokens for all bytes, and nothing strips or replaces others."""
        added = self._backend.get_added_tokens_decoder().values()
        strips = any((token.lstrip or token.rstrip) and not token.special for token in added)
        normalizer = self._backend.normalizer.__getstate__() if self._backend.normalizer else b""
        try:
            return not (strips or _REPLACES.search(normalizer) or _lost(_PROBE, self.decode(self.encode(_PROBE))))
        except InputError:  # there is no token for what is unknown
            return False

    @functools.cached_property
    def _unknown(self) -> int | None:
        model = json.loads(self._backend.to_str())["model"]
        return self.token_id(model["unk_token"]) if model.get("unk_token") else model.get("unk_id")

    def encode_template(self, text: str) -> list[int]:
        """Encode the output of a chat template, in which the names of special tokens become those tokens."""
        return self.encode_rendering(text)[0]

    def encode_rendering(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Encode like `encode_template`; also return the character range [start, stop) of each token."""
        with _library("encode a rendered conversation"):
            encoding = self._template.encode(_checked(text), add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def decode(self, tokens: Sequence[int], *, special: bool = True) -> str:
        """Decode token ids; bytes that are not UTF-8 become U+FFFD, special tokens their names, or nothing."""
        with _library("decode tokens"):
            return self._backend.decode(list(tokens), skip_special_tokens=not special)

    def decode_after(self, before: Sequence[int], tokens: Sequence[int]) -> str:
        """Decode what `tokens` add to the text of those `before`, such as the space that some decoders strip."""
        joined = list(before[len(self.without_open_bytes(before[:-_JOINED])) :])
        text, known = self.decode([*joined, *tokens]), self.decode(joined)
        same = next((place for place, (a, b) in enumerate(zip(known, text, strict=False)) if a != b), len(known))
        return text[same:]

    def without_open_bytes(self, tokens: Sequence[int]) -> Sequence[int]:
        """Remove byte tokens from the end, since all bytes in a row are decoded as one, right or wrong."""
        end = len(tokens)
        while end and (self._backend.id_to_token(tokens[end - 1]) or "").startswith("<0x"):
            end -= 1
        return tokens[:end]

    def save(self, path: Path) -> None:
        """Write the tokenizer as JSON in the format of the `tokenizers` library."""
        write_atomically(path, self._backend.to_str(pretty=False))

    @functools.cached_property
    def _template(self) -> tokenizers.Tokenizer:
        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())  # the copy has `encode_special_tokens` off
        backend.post_processor = None  # it adds no special tokens here, but would trim spaces from the offsets
        return backend


@contextmanager
def _library(action: str, file: str = "") -> Iterator[None]:
    """Turn what the tokenizers library raises, a panic of its Rust code too, into an `InputError`."""
    try:
        yield
    except BaseException as error:
        is_panic = type(error).__name__ == "PanicException"  # which is no `Exception`
        if isinstance(error, InputError) or not (is_panic or isinstance(error, Exception)):
            raise
        raise InputError(f"The tokenizer {file}cannot {action}: {printable(as_sentence(error))}") from error


def _lost(text: str, decoded: str) -> int:
    """Count the bytes of the characters that a text has and its decoded tokens lack."""
    return sum(len(sign.encode()) * count for sign, count in (Counter(text) - Counter(decoded)).items())


def _checked(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        problem = f"its character at position {error.start} is an unpaired surrogate"
        raise InputError(f"The text cannot be encoded: {problem}.") from error
    return text


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, special: Sequence[str] = (), key: str = "model.vocab_size"
) -> Tokenizer:
    """Train a byte-level BPE tokenizer of `vocab_size` ids; the end-of-text token is 0, and `special` tokens follow it.

    Fewer ids are used if the texts have too few pairs to merge. The result does not depend on the number of threads.
    `InputError`, about `key`, unless there are ids for all bytes and special tokens, which must be distinct.
    """
    distinct = len({EOT_TEXT, "", *special}) == len(special) + 2
    require(distinct, "--special", list(special), f"a list of distinct texts, none of them empty or {EOT_TEXT}")
    allowed = f"at least {MIN_VOCAB + len(special)}: one token per byte, plus {', '.join([EOT_TEXT, *special])}"
    require(vocab_size >= MIN_VOCAB + len(special), key, vocab_size, allowed)
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    # Special tokens come first, so the id of the end-of-text token is 0.
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOT_TEXT, *special],
        show_progress=False,
        initial_alphabet=alphabet,
    )
    with _library("be trained"):
        backend.train_from_iterator(texts, trainer)
    return Tokenizer(backend, bos_text=EOT_TEXT)


def load_tokenizer(
    path: Path,
    eot_text: str | None = None,
    bos_text: str | None = None,
    *,
    default_eot: str | None = None,
    eos_text: str | None = None,
) -> Tokenizer:
    """Load a `tokenizer.json`; `InputError` if it is none, or a token is unknown or ambiguous.

    `eot_text` ends a document; None selects the one of `EOT_TEXTS` in the vocabulary, or `default_eot` if it has none
    or several. `bos_text`, if any, begins a document; `eos_text`, if any, also ends a turn or a text.
    """
    with _library("be read", f"file {path} "):
        require_regular(path)
        backend = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
        template, config = path.with_name("chat_template.jinja"), read_beside(path.with_name(TOKENIZER_CONFIG))
        source = template.read_text(encoding="utf-8") if template.is_file() else str(config.get("chat_template"))
        added = backend.get_added_tokens_decoder()
        stops = [added[end].content for end in end_tokens(path.parent, GENERATION) if end in added]
    known = [text for text in EOT_TEXTS if backend.token_to_id(text) is not None]
    eot_text = eot_text or (known[0] if len(known) == 1 else default_eot)
    for text, role in ((eot_text, "end"), (bos_text, "begin")):
        if text is not None and backend.token_to_id(_checked(text)) is None:
            raise InputError(f"The tokenizer file {path} has no token {text!r} to {role} a document.")
    if eot_text is None:
        has = f"has {' and '.join(known)}" if known else f"has none of {', '.join(EOT_TEXTS)}"
        raise InputError(
            f"The tokenizer file {path} {has}; name the token that ends a document as eos_token of a "
            "tokenizer_config.json beside it, or with --eot of data prepare."
        )
    tokenizer = Tokenizer(backend, eot_text, bos_text, eos_text, stops)
    return Tokenizer(backend, eot_text, bos_text, eos_text, [*stops, *tokenizer.controls(source)])


def end_tokens(folder: Path, *files: str) -> list[int]:
    """Read the ids that end a text in `files` of a folder, such as `config.json` and `generation_config.json`."""
    ids = [read_beside(folder / name).get("eos_token_id") for name in files]
    return [token for value in ids if value is not None for token in (value if isinstance(value, list) else [value])]


def read_beside(path: Path) -> dict[str, Any]:
    """Read a JSON object beside a tokenizer, {} if there is no such file."""
    return read_object(path) if path.is_file() else {}


def tokenizer_path(named: str) -> Path:
    """Return the `tokenizer.json` that --tokenizer names, the file or its folder; `InputError` if there is none."""
    path = expanded(named)
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        allowed = "must be a tokenizer.json or a folder that has one"
        raise InputError(f"--tokenizer is {named!r}, but {allowed}.{hub_hint(named)}")
    return path


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int, path: Path) -> None:
    """Raise `InputError` if the tokenizer at `path` has more tokens than the model's `vocab_size`."""
    if tokenizer.vocab_size > vocab_size:
        raise InputError(
            f"The tokenizer file {path} has {tokenizer.vocab_size} tokens, more than model.vocab_size ({vocab_size}); "
            f"raise model.vocab_size to at least {tokenizer.vocab_size}."
        )


def vocabulary_warning(tokenizer: Tokenizer, vocab_size: int) -> str | None:
    """Return a warning about unused embedding rows; None if they only pad to a multiple of `_PADDED_TO`."""
    if -(-tokenizer.vocab_size // _PADDED_TO) * _PADDED_TO >= vocab_size:
        return None
    return (
        f"Warning: the tokenizer has {tokenizer.vocab_size:,} tokens, but model.vocab_size is {vocab_size:,}; "
        f"{vocab_size - tokenizer.vocab_size:,} rows of the embedding are never used. Lower model.vocab_size, or use a "
        "larger tokenizer."
    )
