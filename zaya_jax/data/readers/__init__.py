"""Read documents from text, JSONL, Parquet, Arrow and Megatron files, in units that processes share. No jax."""
