"""The ZAYA1 model and what it knows of itself."""
