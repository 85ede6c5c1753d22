"""The ZAYA1 model, its loss, adapters and FLOP counts."""
