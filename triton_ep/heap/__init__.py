"""The symmetric heap: base.py has the protocol, registry.py the list of heaps, gpu.py the common part of GPU heaps."""
