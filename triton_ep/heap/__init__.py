"""The symmetric heap: base.py has the protocol, registry.py which there are, gpu.py what those of GPUs share."""
