"""What is measured or compiled on a machine."""
