"""Kinds of tables, each in a package of its own: how it is recognised, its versions, and what it refuses."""
