"""Benchmarks against other projects, on the same machine in the same run."""
