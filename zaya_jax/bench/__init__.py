"""Measurements against a named peer, on the same machine in the same run."""
