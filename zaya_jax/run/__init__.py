"""A run on disk, without jax: its folder, checkpoints, fencing token, retention, metric rows and tokenizer.

Beside them, for the processes of a run, also without jax: `signals` and `launcher`.
"""
