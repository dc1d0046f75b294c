"""Microscaling (MX) formats and NVFP4: small floats that share a scale per block.

`formats.py` lists the formats. `arithmetic.py` quantises with torch operations. `tensor.py` has `MXTensor` and its
torch operations, `operations.py` the operations of any block-scaled tensor; `nvfp4.py` has `NVFP4Tensor`. `mm.py`
multiplies, `swizzle.py` lays scales out for the hardware. `linear.py`, `nvfp4_linear.py` and `convert.py` put both
tensors into models, `serialize.py` into files.
"""

# Both classes register themselves with `serialize`, so a process that imports this package can load saved tensors.
from triton_ep.mx import nvfp4, tensor  # noqa: F401
