"""Read and write `transformers` folders in both layouts."""
