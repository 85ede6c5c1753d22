"""Properties of kernels counted from their intermediate code, without the compiler of a GPU."""
