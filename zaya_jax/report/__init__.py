"""The command that writes one page about one or several runs; the page itself is `zaya_jax.aegis.report`."""
