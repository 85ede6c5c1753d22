"""The report of a GPU: what it computes, how fast, and whether training on it can be trusted."""
