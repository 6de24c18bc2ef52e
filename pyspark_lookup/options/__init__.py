"""The `lookup.*` options with their types and defaults, the conf file, and the triggers of reloads.

The options of a single kind of table are declared in the package of that kind, below `sources/`.
"""
