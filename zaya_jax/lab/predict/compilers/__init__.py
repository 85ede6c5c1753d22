"""XLA's compilers for NVIDIA and AMD GPUs, run on a machine without one."""
