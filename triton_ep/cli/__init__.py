"""The command line: `triton-ep doctor` and `triton-ep demo`."""
