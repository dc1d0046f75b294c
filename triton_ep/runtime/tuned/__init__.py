"""Tuned choices: tables that `triton-ep tune` writes, and where a layer made with num_sm=None looks.

table.py has the format, choose.py the look-up. The tables that come with the package lie beside them.
"""
