"""Kernels that may reach other nodes, by put and signal: splits, barrier (of single-node layers too), dispatch, combine."""
