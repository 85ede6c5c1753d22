"""The data pipeline: corpus → tokenizer → shards → packed rows → batches. None of it imports jax."""
