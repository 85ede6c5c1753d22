"""Text generation: prefill, decode and sampling."""
