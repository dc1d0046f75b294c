"""deep_ep.buffers, the package of buffers in version 2 of DeepEP."""

from triton_ep.integrations.deep_ep import buffer as legacy
from triton_ep.integrations.deep_ep import elastic, ep

__all__ = ["elastic", "ep", "legacy"]
