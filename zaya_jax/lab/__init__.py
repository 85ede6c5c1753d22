"""The laboratory: predictions of steps, and measurements of machines; training does not need it."""
