"""Device code: Triton kernels and the helpers they share. Imports neither torch nor nvshmem.

Installed, and imported, as `triton_ep.kernels`; launched by `triton_ep.ops` only.
"""

# Under its own name, which the current directory of a checkout offers, this package is empty: others look for a package
# of that name, such as transformers for its hub of kernels, and must not fail.
if __name__ != "triton_ep.kernels":
    __path__ = []

    def __getattr__(name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ImportError(
            f"this folder was imported as {__name__!r}; it is the package triton_ep.kernels. Put the checkout's "
            "root on sys.path (or run `pip install -e .` there) and write `from triton_ep.kernels import ...`."
        )
