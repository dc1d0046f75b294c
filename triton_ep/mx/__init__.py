"""Microscaling (MX) formats: small floats that share a power-of-two scale per block.

`formats.py` says which there are, `arithmetic.py` quantises with torch operations, `tensor.py` has `MXTensor`,
`aten.py` what torch's operations do to it; `mm.py` multiplies, `swizzle.py` lays scales out for the hardware.
"""
