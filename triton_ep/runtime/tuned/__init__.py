"""Tuned settings: tables that `triton-ep tune` writes, which layers created with num_sm=None read.

table.py has the format and the look-up. The tables of the package are the .toml files next to it.
"""
