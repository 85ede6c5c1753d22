"""Training: the programs of the phases, the training step, the trainer and the loop around it."""
