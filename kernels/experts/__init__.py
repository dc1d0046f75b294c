"""Kernels of the experts of a MoE layer, on one GPU: products over segments of rows, activation, row scales."""
