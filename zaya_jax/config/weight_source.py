"""Names of a model's weights, as in `init_from` and on command lines."""

import os
from typing import Literal, NamedTuple

HF = "hf:"  # prefix of a transformers folder


class WeightSource(NamedTuple):
    """A source of weights, classified by its prefix."""

    kind: Literal["checkpoint", "transformers"]  # `checkpoint_folder` resolves a checkpoint's path
    path: str  # the text after the prefix, as the user typed it


def parse_source(text: str) -> WeightSource:
    """Parse the name of a source; a path that exists is no prefix and FOLDER."""
    is_hf = text.startswith(HF) and not os.path.lexists(text)
    return WeightSource("transformers" if is_hf else "checkpoint", text.removeprefix(HF) if is_hf else text)
