"""Launchers: tensors in, arguments out, launch. No other package launches kernels.

A launcher of the exchange takes the context first, allocates the kernel's outputs and launches on the current stream.
The layer has checked the arguments before anything is sent.
"""
