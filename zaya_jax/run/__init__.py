"""A run on disk, without jax: its folder, checkpoints, fencing token, retention, metric rows and tokenizer."""
