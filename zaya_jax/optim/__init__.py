"""Muon, AdamW and balancing, by role."""
