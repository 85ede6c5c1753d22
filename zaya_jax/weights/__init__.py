"""Weights of a run, a phase, a checkpoint, a `transformers` folder, or adapters; `load.open_weights` opens any."""
