"""Functions and types that kernels share and inline: the device context (job.py), records, waits, transport, rows."""
