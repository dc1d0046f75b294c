"""Kernels that access peers on their node by plain loads and stores: dispatch, combine, low latency, compact rows."""
