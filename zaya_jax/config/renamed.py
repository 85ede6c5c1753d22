"""Keys of earlier versions: rejected in user configurations, translated in saved runs and checkpoints."""

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
    """Translate the keys of a saved configuration to those of this version."""
    if isinstance(tree, list):
        return [with_current_keys(item) for item in tree]
    if isinstance(tree, dict):
        return {RENAMED.get((section, key), key): with_current_keys(value, key) for key, value in tree.items()}
    return tree


def current_key(dotted: str) -> str:
    """Translate a dotted key of a saved configuration to this version's key."""
    names = dotted.split(".")
    return ".".join(RENAMED.get((section, key), key) for section, key in zip(["", *names], names, strict=False))
