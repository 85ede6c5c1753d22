"""The data pipeline: corpus → tokenizer → shards → packed rows → batches. It does not import jax."""
