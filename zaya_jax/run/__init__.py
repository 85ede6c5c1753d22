"""A run on disk: folder, checkpoints, fencing, retention, metrics, tokenizer; also signals and launcher. No jax."""
