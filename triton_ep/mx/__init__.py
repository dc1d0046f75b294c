"""Microscaling (MX) formats: small floats that share a power-of-two scale per block.

`formats.py` says which there are, `arithmetic.py` quantises with torch operations, `tensor.py` has `MXTensor`.
"""
