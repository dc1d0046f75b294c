"""Running kernels: launches and their plans, Triton's interpreter on CPU ranks, tuned settings, the environment."""
