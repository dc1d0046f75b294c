"""Microscaling (MX) formats and NVFP4: small floats that share a scale per block.

`formats.py` says which there are, `arithmetic.py` quantises with torch operations, `tensor.py` has `MXTensor` and what
torch's operations do to it, `operations.py` what they do to any block-scaled tensor; `mm.py` multiplies, `swizzle.py`
lays scales out for the hardware. `nvfp4.py` has `NVFP4Tensor`. `linear.py`, `nvfp4_linear.py` and `convert.py` put both
into models, `serialize.py` into files.
"""

# A process that imports this package can load what others saved: both classes make themselves known to `serialize`.
from triton_ep.mx import nvfp4, tensor  # noqa: F401
