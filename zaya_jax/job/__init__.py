"""Several processes as one job: rendezvous, proof of membership, liveness, and a common step to stop at."""
