"""Integrations: triton_ep under the names and calling conventions of other packages. Each integration is a package of
its own. `import triton_ep` loads none of them, and each imports its framework only when it is used."""
