"""Front doors: triton_ep under the names and calling conventions of other packages. Each is a module of its own, which
`import triton_ep` does not load, and imports its framework only when it is used."""
