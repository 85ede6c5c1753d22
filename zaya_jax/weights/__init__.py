"""One door to weights: a run, a phase of a run, a checkpoint, a `transformers` folder, adapters on a base."""
