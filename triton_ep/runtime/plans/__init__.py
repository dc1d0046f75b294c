"""What every call site launches: kernel, constexprs and options, from the sizes of a layer alone.

One function per kernel of the layer. `ops` launches what it returns, `aot` compiles it ahead of time; both ask the same
function, so neither can ask for what the other does not have. Needs neither torch nor Triton.
"""

from triton_ep.runtime.plans.shape import Plan, Shape

__all__ = ["Plan", "Shape"]
