"""The mesh and the gradient region: how the model is laid over devices, from outside."""
