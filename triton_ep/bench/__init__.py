"""Benchmarks: what `triton-ep bench` runs. Each checks a result, times it, and writes rows of one form.

Method and columns: docs/benchmarks/README.md.
"""
