"""Kernels whose peers are reached by plain stores: dispatch and combine inside a node, also of few tokens."""
