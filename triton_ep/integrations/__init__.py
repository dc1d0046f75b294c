"""Integrations: triton_ep under the names and calling conventions of other packages, one subpackage each.
`import triton_ep` loads none of them, and each imports its framework only when it is used."""
