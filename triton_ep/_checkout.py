"""Lets a checkout that was never installed import `triton_ep.kernels` and `triton_ep.aot`.

The two folders stand beside `triton_ep/` and are mapped below it when the package is built (pyproject.toml,
`tool.setuptools.package-dir`), so that nothing named `kernels` or `aot` lands at the top of site-packages.
In a wheel they are inside and nothing is done here.
"""

from pathlib import Path


def extend_path(package_path: list[str]) -> None:
    """Append the checkout's root to `triton_ep.__path__`, unless the package carries its own kernels."""
    package = Path(__file__).resolve().parent
    root = package.parent
    if not (package / "kernels").is_dir() and (root / "kernels" / "__init__.py").is_file():
        package_path.append(str(root))
