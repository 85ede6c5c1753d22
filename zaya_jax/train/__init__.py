"""The phase program, the trainer and the steps of a run."""
