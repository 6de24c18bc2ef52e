"""Rows on disk with an index of their keys, memory-mapped."""
