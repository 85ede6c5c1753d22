"""Tokenize documents and write them as shards."""
