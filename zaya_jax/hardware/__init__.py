"""Accelerators: data sheets, detection, and presets of flags and timeouts."""
