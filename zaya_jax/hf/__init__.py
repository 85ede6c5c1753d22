"""Folders of `transformers`: their layouts, read and written."""
