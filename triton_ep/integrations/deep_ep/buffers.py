"""deep_ep.buffers, the package of buffers in version 2 of DeepEP."""

from triton_ep.integrations.deep_ep import buffer as legacy
from triton_ep.integrations.deep_ep import elastic

__all__ = ["elastic", "legacy"]
