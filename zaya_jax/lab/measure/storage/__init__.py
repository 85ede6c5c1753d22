"""Measure the storage as training uses it: reads of packed data, saves and restores of checkpoints."""
