"""muP (maximal update parametrisation) by initialisation and parameter groups: tune narrow, train wide.

`infer` reads the role of every parameter off the architecture, `apply` initialises, the multipliers of the spec go into
the optimizer's groups, and `coord_check` shows whether it worked.
"""
