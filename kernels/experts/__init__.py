"""Kernels of the experts of a MoE layer, on one GPU: products of rows in segments, activation, row scales."""
