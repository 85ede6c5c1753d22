"""Parallelism: mesh, shardings and collectives around a model that does not know of them, and multi-host jobs."""
