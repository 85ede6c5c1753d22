"""Comparisons with other libraries and of training recipes, and the report of GPUs; beside them are their results."""
