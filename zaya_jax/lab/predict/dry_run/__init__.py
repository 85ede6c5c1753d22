"""The dry run: estimate memory, FLOPs, communication and time of a run on devices one does not have."""
