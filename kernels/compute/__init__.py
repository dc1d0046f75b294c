"""Routing, grouped GEMM and MX formats. Only routing_slots stores to peers; the others touch this GPU alone."""
