"""Any weights as a `transformers` folder, without devices: part by part from disk to disk."""

from pathlib import Path

from zaya_jax.hf.exporter import Layout, write_folder
from zaya_jax.run.tokenizer import TOKENIZER_FOLDER
from zaya_jax.weights.load import open_weights


def export_hf(
    source: str, folder: Path, dtype: str, layout: Layout = "hf", carry: Path | None = None, base: str | None = None
) -> str:
    """Write weights as a folder that `transformers` loads; adapters are merged.

    Args:
      source: see `open_weights`.
      folder: new, or empty.
      dtype: of the parameters; balancing biases are fp32 whatever it is.
      layout: see `write_folder`.
      carry: a folder whose tokenizer and generation files come along; those of the source where None.
      base: what adapters were trained on, where `init_from` of their run is no longer right.

    Returns:
      A sentence that says what was written.

    Raises:
      InputError: the weights are damaged; see `write_folder` for more.
    """
    weights = open_weights(source, "CHECKPOINT", base)
    weights.verify()
    carry = carry or weights.tokenizer
    write_folder(folder, weights.config, weights.read, dtype, layout, carry)
    hint = "" if carry is not None else (
        f" It has no tokenizer, since {weights.folder.parent.parent} has no folder {TOKENIZER_FOLDER}/: add the files "
        "of one with --carry FOLDER."
    )  # fmt: skip
    return f"Exported {weights.folder} to {folder} in {dtype}.{hint}"
