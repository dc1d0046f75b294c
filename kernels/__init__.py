"""Device code: Triton kernels and the helpers they share. Imports neither torch nor nvshmem.

Installed, and imported, as `triton_ep.kernels`; launched by `triton_ep.ops` only.
"""

if __name__ != "triton_ep.kernels":
    raise ImportError(
        f"this folder was imported as {__name__!r}; it is the package triton_ep.kernels. Put the checkout's "
        "root on sys.path (or run `pip install -e .` there) and write `from triton_ep.kernels import ...`."
    )
