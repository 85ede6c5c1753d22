"""Load the weights of a run, a phase, a checkpoint, a `transformers` folder, or adapters on their base model.

`load.open_weights` opens any of them. `interop` (import-hf, export-hf), `average` and `verify` (verify-hf) implement
commands of `python -m zaya_jax.checkpoint` on top of it.
"""
