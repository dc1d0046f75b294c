"""Kernels whose peers are reached by put and signal: dispatch and combine between nodes."""
