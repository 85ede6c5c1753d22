"""Prefill, decode and sampling."""
