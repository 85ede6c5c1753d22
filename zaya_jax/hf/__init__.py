"""Folders of `transformers`: import, export and comparison, and adapters."""
