"""How kernels run: launches, their plans, Triton's interpreter on CPU ranks, measured settings, the environment."""
