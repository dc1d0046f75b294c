"""Kernels of one GPU: routing, quantisation, grouped GEMM. Routing alone stores to peers, for the push after it."""
