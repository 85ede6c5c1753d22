"""Sources, mixtures, packing and batches of a run."""
