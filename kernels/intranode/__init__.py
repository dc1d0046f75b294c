"""Kernels whose peers are reached by plain stores: dispatch, combine, splits, barrier inside a node."""
