"""Save, restore, verify, inspect and prune the checkpoints of a run."""
