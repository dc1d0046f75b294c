"""Benchmarks: scripts that check a result, time it, and append rows to a CSV file (docs/benchmarks/README.md)."""
