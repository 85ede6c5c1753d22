"""Measure matrix products: squares, those of a configuration, grouped ones, Newton–Schulz and attention."""
