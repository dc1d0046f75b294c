"""Kernels that may reach other nodes, by put and signal: splits, barrier (in one node too), dispatch and combine."""
