"""deep_ep, served by triton_ep."""

from triton_ep.integrations.deep_ep.shim import serve

serve()
