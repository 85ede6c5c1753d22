"""Names of intermediate values, by which a rematerialisation policy can keep them."""

MATMUL_OUTPUT = "product"  # what is dear to compute again: results of matrix products and of attention
