"""Kernels that may reach other nodes by put-with-signal: splits, barrier (also in one node), dispatch and combine."""
