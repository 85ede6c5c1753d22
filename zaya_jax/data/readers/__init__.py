"""Documents of text, JSONL, Parquet, Arrow and Megatron files, read in pieces that many processes share; no jax."""
