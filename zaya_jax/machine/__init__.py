"""Commands that describe, test and time a machine, and the dry run for machines one does not have."""
