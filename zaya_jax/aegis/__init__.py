"""The supervisor that keeps a training run alive: `python -m zaya_jax.aegis`."""
