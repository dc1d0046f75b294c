"""What kernels share, inlined into them: the device context (job.py), records, waits, transport, rows."""
