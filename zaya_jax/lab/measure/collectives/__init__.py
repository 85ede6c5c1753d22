"""Measure collectives over sizes, dtypes and device counts, with the conventions of nccl-tests and rccl-tests."""
