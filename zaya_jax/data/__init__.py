"""From a folder of text to batches: corpus → tokenizer → shards → windows → pipeline; none of it imports jax."""
