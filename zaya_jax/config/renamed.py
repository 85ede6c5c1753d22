"""Keys of earlier versions: refused in what a person writes, translated in what a run or a checkpoint has saved."""

from typing import Any

# (section, key of an earlier version) → key
RENAMED = {
    ("batch", "micro"): "micro_batch",
    ("checkpoint", "loss_window"): "max_unsaved_seconds",
    ("evaluation", "batch"): "batch_size",
    ("muon", "iterates"): "newton_schulz_dtype",
    ("parallel", "reduce"): "gradient_reduction",
}


def with_current_keys(tree: Any, section: str = "") -> Any:
    """A saved configuration, whatever version wrote it, with the keys of this one."""
    if isinstance(tree, list):
        return [with_current_keys(item) for item in tree]
    if isinstance(tree, dict):
        return {RENAMED.get((section, key), key): with_current_keys(value, key) for key, value in tree.items()}
    return tree


def current_key(dotted: str) -> str:
    """A dotted key of a saved configuration, whatever version wrote it, as this one has it."""
    names = dotted.split(".")
    return ".".join(RENAMED.get((section, key), key) for section, key in zip(["", *names], names, strict=False))
