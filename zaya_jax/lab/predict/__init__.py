"""Predictions that need no accelerator: the dry run, XLA's compilers, and rules of sizing."""
