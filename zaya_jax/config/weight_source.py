"""What names the weights of a model, in `init_from` and on command lines."""

from dataclasses import dataclass
from typing import Literal

HF = "hf:"  # before a folder of transformers


@dataclass(frozen=True)
class WeightSource:
    """A source of weights, told by its form alone: nothing is looked up on disk.

    Attributes:
      kind: 'checkpoint' for RUN_DIR, RUN_DIR@PHASE or RUN_DIR/checkpoints/STEP, which `run.checkpoints` tells apart by
        what is there; 'transformers' for hf:FOLDER.
      path: what follows the prefix, as it was typed.
    """

    kind: Literal["checkpoint", "transformers"]
    path: str


def parse_source(text: str) -> WeightSource:
    """The source that `text` names."""
    return WeightSource("transformers" if text.startswith(HF) else "checkpoint", text.removeprefix(HF))
