"""Kernels that reach peers of their node by plain loads and stores: dispatch, combine, low latency, compact rows."""
