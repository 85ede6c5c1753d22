"""Names of a model's weights, as in `init_from` and on command lines."""

import os
from dataclasses import dataclass
from typing import Literal

HF = "hf:"  # prefix of a transformers folder


@dataclass(frozen=True)
class WeightSource:
    """A source of weights, classified by its prefix."""

    # 'transformers' for hf:FOLDER, else 'checkpoint' for RUN_DIR, RUN_DIR@PHASE or RUN_DIR/checkpoints/STEP
    # (`run.checkpoints.checkpoint_folder` resolves them on disk)
    kind: Literal["checkpoint", "transformers"]
    path: str  # the text after the prefix, as the user typed it


def parse_source(text: str) -> WeightSource:
    """Parse the name of a source; a path that exists is no prefix and FOLDER."""
    is_hf = text.startswith(HF) and not os.path.lexists(text)
    return WeightSource("transformers" if is_hf else "checkpoint", text.removeprefix(HF) if is_hf else text)
