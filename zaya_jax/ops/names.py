"""Names of intermediate values, by which a rematerialization policy can save them."""

MATMUL_OUTPUT = "product"  # expensive to recompute: results of matmuls and of attention
