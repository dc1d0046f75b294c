"""Plans of all launches: kernel, constexprs and options, from the sizes of a layer alone.

One function per kernel of the layer. `ops` launches the plan that it returns and `aot` compiles the plan ahead of time:
because both call the same function, they always agree. Needs neither torch nor Triton.
"""

from triton_ep.runtime.plans.shape import Plan, Shape

__all__ = ["Plan", "Shape"]
