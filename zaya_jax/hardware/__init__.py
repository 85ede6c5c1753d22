"""Accelerators by name: data sheets, and presets of flags and timeouts."""
