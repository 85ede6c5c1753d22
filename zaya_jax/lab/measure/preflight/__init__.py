"""Check in about two minutes that the devices of a job are ready to train: kernels, speeds and collectives."""
