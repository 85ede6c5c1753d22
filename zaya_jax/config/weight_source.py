"""Names of a model's weights, as in `init_from` and on command lines."""

import os

HF = "hf:"  # prefix of a transformers folder


def hf_folder(source: str) -> str | None:
    """Return FOLDER of hf:FOLDER as it was typed; None for a checkpoint, also if its path exists and starts so."""
    return source.removeprefix(HF) if source.startswith(HF) and not os.path.lexists(source) else None
