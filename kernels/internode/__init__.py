"""Kernels that reach any rank, by store or by put and signal: splits exchange and barrier, which every layer runs, and
dispatch and combine between nodes."""
