"""The symmetric heap: base.py has the protocol, registry.py the list of heaps, gpu.py what heaps of GPUs share."""
