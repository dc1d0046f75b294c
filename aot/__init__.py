"""Ahead-of-time compilation of the kernels. Installed and imported as `triton_ep.aot`."""
