"""State on disk: the run's own checkpoints, and `transformers` folders."""
