"""deep_ep.buffers, where version 2 of DeepEP has its buffers."""

from triton_ep.integrations.deep_ep import buffer as legacy
from triton_ep.integrations.deep_ep import elastic

__all__ = ["elastic", "legacy"]
