"""The symmetric heap: base.py has the protocol, host.py and nvshmem.py the two backends."""
