"""`python -m triton_ep.cli` is `triton-ep`."""

import sys

from triton_ep.cli import main

if __name__ == "__main__":
    sys.exit(main())
