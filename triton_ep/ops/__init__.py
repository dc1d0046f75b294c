"""Launchers: tensors in, arguments out, launch. The only importers of kernels.

Each takes the context as its first argument, allocates what the kernel writes, and launches on the current
stream. Arguments are checked by the layer, before anything is sent.
"""
