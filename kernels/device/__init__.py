"""Helpers inlined into kernels: waits, transport, rows. All that intra-node and inter-node kernels share."""
