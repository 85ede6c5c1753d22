"""One door to weights: a run, a phase of a run, a checkpoint, a `transformers` folder, adapters on a base.

`load.open_weights` is the door; `interop` (import-hf, export-hf), `average` and `verify` (verify-hf) are commands of
`python -m zaya_jax.checkpoint` that go through it.
"""
